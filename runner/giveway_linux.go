package runner

import "syscall"

// giveProcessor lets another thread have the processor, in whatever process, if one waits for it.
func giveProcessor() { _, _, _ = syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0) }
