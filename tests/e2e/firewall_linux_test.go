package e2e

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/org-runink/runbus/runner"
	"github.com/org-runink/runbus/tests/stack"
)

// behindFirewall is set in the process that runs inside of TestOnly443IsOpen's network.
const behindFirewall = "RUNBUS_TEST_BEHIND_FIREWALL"

// firewall lets TCP pass over IPv6 to and from port 443, and nothing else.
const firewall = `set -e
ip link set lo up
ip -6 rule add pref 10 ipproto tcp dport 443 lookup local
ip -6 rule add pref 11 ipproto tcp sport 443 lookup local
ip -6 rule add pref 12 ipproto tcp prohibit
ip -6 rule add pref 13 lookup local
ip -6 rule del pref 0
exec "$@"`

// Where nothing but IPv6 and port 443 leads to the control plane, a runner enrols over the WebSocket there (SPEC E10). The test
// runs itself again in a network of its own, which has such a firewall.
func TestOnly443IsOpen(t *testing.T) {
	t.Parallel()
	if os.Getenv(behindFirewall) == "" {
		bin, err := stack.Build(true) // not another time in there
		if err != nil {
			t.Fatal(err)
		}
		args := []string{"--net"}
		if os.Getuid() != 0 {
			args = append(args, "--user", "--map-root-user")
		}
		args = append(args, "sh", "-c", firewall, "sh", os.Args[0], "-test.run", "^TestOnly443IsOpen$", "-test.v")
		cmd := exec.Command("unshare", args...)
		cmd.Env = append(os.Environ(), behindFirewall+"=1", stack.BinariesEnv+"="+filepath.Dir(bin.Face))
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "--- PASS: TestOnly443IsOpen") {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	plane := stack.StartPlane(t, true, map[string]string{"RUNBUS_NATS": "[::1]:4222", "RUNBUS_WEBSOCKET": "[::1]:443"})
	if c, err := net.Dial("tcp", "[::1]:4222"); err == nil {
		_ = c.Close()
		t.Fatal("the firewall lets port 4222 pass")
	}
	src := newSource(t)
	src.let()
	plane.StartRunner(t, "edge", map[string]string{"RUNNER_ENROLL_ADDR": "wss://[::1]"})
	if end := plane.Admin.Fetch(t, src.body("edge")).End(); end.Type != "result" {
		t.Errorf("a fetch ends with %+v", end)
	}
	_, token := plane.Admin.MintKey(t, "patient")
	env := plane.RunnerEnv("patient", token)
	finds(t, doctor(t, plane, env, 1), "tcp", "permission denied")
	env["RUNNER_ENROLL_ADDR"] = "wss://[::1]"
	if d := doctor(t, plane, env, 0); d.Verdict == runner.CheckFail {
		t.Errorf("%+v", d)
	}
}
