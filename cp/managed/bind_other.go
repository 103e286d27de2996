//go:build !linux

package managed

import (
	"os/exec"
	"syscall"
)

// bindToParent keeps a terminal's signals from the child, which its parent stops in order. That the parent has ended in another way the
// child learns by its lifeline.
func bindToParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
}
