package managed

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/org-runink/runbus/internal/durable"
	"github.com/org-runink/runbus/internal/selfguard"
)

// inherited is all that a child gets of this process's environment. None of it is a secret, or leads to one.
var inherited = []string{
	"LOG_LEVEL", "LOG_FORMAT", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR", "GOMAXPROCS", "GOMEMLIMIT", "GOGC", "GODEBUG", "GORACE",
	selfguard.EnvDebug,
}

// environ is the whole environment of the child, whose state folder is dir.
func (c *child) environ(dir string) []string {
	conf := &c.r.c
	set := map[string]string{
		"RUNNER_LIFELINE": strconv.Itoa(lifelineDescriptor), "CORE_RUNNER_STATE_DIR": dir, "RUNNER_DRAIN_GRACE": conf.DrainGrace.String(),
	}
	switch {
	case conf.Policy != "":
		set["RUNNER_POLICY"] = conf.Policy
	case c.tenant != conf.Own:
		set["RUNNER_POLICY"] = filepath.Join(dir, policyFile)
	}
	if c.tenant == conf.Own && len(conf.FileRoots) > 0 {
		set["RUNNER_FILE_ROOTS"] = strings.Join(conf.FileRoots, string(os.PathListSeparator))
	}
	if conf.Concurrency > 0 {
		set["RUNNER_CONCURRENCY"] = strconv.Itoa(conf.Concurrency)
	}
	for name, value := range conf.Env {
		set[name] = value
	}
	var env []string
	for _, name := range inherited {
		if value, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+value)
		}
	}
	for name, value := range set {
		env = append(env, name+"="+value)
	}
	return env
}

// keepFiles keeps from the children what this process was started with. What it opened itself Go keeps from them.
func keepFiles() {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return // not Linux
	}
	for _, e := range entries {
		if fd, err := strconv.Atoi(e.Name()); err == nil && fd > 2 {
			syscall.CloseOnExec(fd)
		}
	}
}

// policyFile is the policy of a tenant's runner that none was given for.
const policyFile = "policy.yaml"

//go:embed policy.yaml
var strangersPolicy []byte

// folder makes the tenant's state folder with what belongs into it, and returns it.
func (c *child) folder() (string, error) {
	dir := filepath.Join(c.r.c.StateDir, c.tenant) // a DNS label
	for _, d := range []string{c.r.c.StateDir, dir} {
		if err := os.Mkdir(d, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return "", err
		}
		info, err := os.Lstat(d)
		if err != nil {
			return "", err
		}
		if !info.IsDir() || info.Mode().Perm()&0o077 != 0 {
			return "", fmt.Errorf("%s is no folder of this user alone (mode %v)", d, info.Mode())
		}
	}
	if c.tenant == c.r.c.Own || c.r.c.Policy != "" {
		return dir, nil
	}
	own, err := net.InterfaceAddrs()
	if err != nil {
		return "", fmt.Errorf("which addresses this host has: %w", err)
	}
	return dir, durable.Replace(filepath.Join(dir, policyFile), policyOn(own), nil)
}

// policyOn is strangersPolicy on a host with these addresses: it may have public ones, where what listens on all of them listens too. One
// that the host gets later is refused from the next start of the child on.
func policyOn(own []net.Addr) []byte {
	var cidrs []string
	for _, a := range own {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		if ip, ok := netip.AddrFromSlice(n.IP); ok {
			ip = ip.Unmap()
			cidrs = append(cidrs, strconv.Quote(netip.PrefixFrom(ip, ip.BitLen()).String()))
		}
	}
	text, rules := bytes.Clone(strangersPolicy), 0
	for some := range slices.Chunk(cidrs, mostCIDRs) {
		rules++
		text = fmt.Appendf(text, "  - name: own-addresses-%d\n    cidrs: [%s]\n", rules, strings.Join(some, ", "))
	}
	return text
}

// mostCIDRs is how many a rule of a policy may have (docs/policy.md).
const mostCIDRs = 1000
