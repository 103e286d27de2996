package main

import (
	"os/exec"
	"syscall"
)

// ownGroup keeps a terminal's signals from the child, and ends it if this process is killed.
func ownGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
}
