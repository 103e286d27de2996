//go:build !linux

package main

import (
	"os/exec"
	"syscall"
)

// ownGroup keeps a terminal's signals from the child.
func ownGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }
