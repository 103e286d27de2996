package runner

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// A secret that came in the environment is neither there nor in what the kernel shows of the process afterwards; others stay.
func TestForgetEnv(t *testing.T) {
	const child = "RUNBUS_TEST_FORGET"
	if os.Getenv(child) != "" {
		must(t, ForgetEnv("A_SECRET", "EMPTY", "NOT_THERE"))
		shown, err := os.ReadFile("/proc/self/environ")
		must(t, err)
		text := string(shown)
		if strings.Contains(text, "c4nary") || os.Getenv("A_SECRET") != "" || !strings.Contains(text, "NOT_A_SECRET=kept\x00") || os.Getenv("NOT_A_SECRET") != "kept" {
			t.Errorf("the environment shows %q", text)
		}
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestForgetEnv$")
	cmd.Env = []string{"BEFORE=1", "A_SECRET=c4nary", "EMPTY=", "NOT_A_SECRET=kept", child + "=1"}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
