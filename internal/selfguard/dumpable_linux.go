package selfguard

import (
	"fmt"
	"syscall"
)

// dumpable asks whether a core file of this process may be made and its memory be read by others of its user (PR_GET_DUMPABLE).
func dumpable() (bool, error) {
	is, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, syscall.PR_GET_DUMPABLE, 0, 0)
	if errno != 0 {
		return false, fmt.Errorf("PR_GET_DUMPABLE: %w", errno)
	}
	return is == 1, nil
}

// setDumpable says it (PR_SET_DUMPABLE).
func setDumpable(may bool) error {
	var is uintptr
	if may {
		is = 1
	}
	if _, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, syscall.PR_SET_DUMPABLE, is, 0); errno != 0 {
		return fmt.Errorf("PR_SET_DUMPABLE: %w", errno)
	}
	return nil
}

// openToItself makes /proc/self/mem this process's own until restore is called.
func openToItself() (restore func() error, err error) {
	open, err := dumpable()
	if err != nil || open {
		return func() error { return nil }, err
	}
	return func() error { return setDumpable(false) }, setDumpable(true)
}
