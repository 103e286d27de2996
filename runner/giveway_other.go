//go:build !linux

package runner

import "runtime"

// giveProcessor lets others have the processor, if one waits for it.
func giveProcessor() { runtime.Gosched() }
