package selfguard

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// role is set in a process that a test starts: what it is to do.
const role = "RUNBUS_TEST_SELFGUARD"

func TestMain(m *testing.M) {
	if os.Getenv(role) == "abort" {
		Main()
		_ = syscall.Kill(os.Getpid(), syscall.SIGABRT)
		select {}
	}
	os.Exit(m.Run())
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// again runs this test in a process of its own with that environment.
func again(t *testing.T, env ...string) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append([]string{role + "=1", "PATH=" + os.Getenv("PATH")}, env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// A secret that came in the environment is neither there nor in what the kernel shows of the process afterwards; others stay, and what is
// only hidden is still inherited.
func TestForgetEnv(t *testing.T) {
	if os.Getenv(role) == "" {
		again(t, "BEFORE=1", "A_SECRET=c4nary", "EMPTY=", "INHERITED=c4nary", "NOT_A_SECRET=kept")
		return
	}
	must(t, Process(func(string) string { return "" })) // its files are root's then
	must(t, ForgetEnv("A_SECRET", "EMPTY", "NOT_THERE"))
	must(t, HideEnv("INHERITED"))
	if is, err := dumpable(); err != nil || is {
		t.Errorf("the process may be dumped afterwards (%v)", err)
	}
	must(t, setDumpable(true)) // to look
	shown, err := os.ReadFile("/proc/self/environ")
	must(t, err)
	text := string(shown)
	if strings.Contains(text, "c4nary") || os.Getenv("A_SECRET") != "" || !strings.Contains(text, "NOT_A_SECRET=kept\x00") || os.Getenv("NOT_A_SECRET") != "kept" {
		t.Errorf("the environment shows %q", text)
	}
	out, err := exec.Command("sh", "-c", "echo $INHERITED").Output()
	if err != nil || string(out) != "c4nary\n" {
		t.Errorf("a child has %q (%v)", out, err)
	}
}

// The limit holds for those that it starts too; for a debugger the process may stay open.
func TestProcess(t *testing.T) {
	if os.Getenv(role) == "" {
		again(t)
		return
	}
	must(t, Process(func(name string) string { return map[string]string{EnvDebug: "true"}[name] }))
	if is, err := dumpable(); err != nil || !is {
		t.Errorf("a process to be debugged is closed (%v)", err)
	}
	must(t, Process(func(string) string { return "" }))
	if is, err := dumpable(); err != nil || is {
		t.Errorf("the process may be dumped (%v)", err)
	}
	var core syscall.Rlimit
	must(t, syscall.Getrlimit(syscall.RLIMIT_CORE, &core))
	if core.Cur != 0 || core.Max != 0 {
		t.Errorf("core files of %d bytes, or %d", core.Cur, core.Max)
	}
	if out, err := exec.Command("sh", "-c", "ulimit -c; ulimit -Hc").Output(); err != nil || string(out) != "0\n0\n" {
		t.Errorf("a child has %q (%v)", out, err)
	}
}

// However it ends there is no core file, on a host that makes one of a program that doesn't guard itself.
func TestNoCoreFile(t *testing.T) {
	dumped := func(command string) bool {
		t.Helper()
		cmd := exec.Command("sh", "-c", "ulimit -c $(ulimit -Hc); "+command)
		cmd.Dir = t.TempDir()
		cmd.Env = append(os.Environ(), role+"=abort", "GOTRACEBACK=crash")
		_ = cmd.Run() // a signal ends it
		status := cmd.ProcessState.Sys().(syscall.WaitStatus)
		if status.Signal() != syscall.SIGABRT {
			t.Fatalf("it ended with %v", cmd.ProcessState)
		}
		return status.CoreDump()
	}
	self, err := os.Executable()
	must(t, err)
	if dumped("exec " + self) {
		t.Error("a core was dumped")
	}
	t.Logf("of an unguarded program this host dumps a core: %v", dumped("kill -ABRT $$"))
}
