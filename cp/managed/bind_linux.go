package managed

import (
	"os/exec"
	"syscall"
)

// bindToParent keeps a terminal's signals from the child, which its parent stops in order, and has the kernel kill it when the parent
// ends, however that ends.
func bindToParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
