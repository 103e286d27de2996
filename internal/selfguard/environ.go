// Package selfguard keeps the secrets of this process from others on its host: out of core files, out of the reach of other processes
// of the same user, and out of what the kernel shows of its environment. What root can do, nothing here prevents.
package selfguard

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// ForgetEnv takes variables out of this process's environment, and out of what /proc shows of it as HideEnv does.
func ForgetEnv(names ...string) error {
	for _, name := range names {
		if err := os.Unsetenv(name); err != nil {
			return fmt.Errorf("unset %s: %w", name, err)
		}
	}
	return HideEnv(names...)
}

// HideEnv overwrites the values of variables in /proc/self/environ: there the kernel shows, to whoever may read it, what the process was
// started with, which os.Unsetenv does not change. os.Getenv still knows them, and programs that are started inherit them. Where there is
// no /proc nothing shows them, and nothing is done. It must not run beside Process.
func HideEnv(names ...string) error {
	// The files of a process that may not be dumped are root's.
	restore, err := openToItself()
	if err != nil {
		return err
	}
	err = hideEnv(names)
	if failed := restore(); err == nil {
		err = failed
	}
	return err
}

func hideEnv(names []string) error {
	shown, err := os.ReadFile("/proc/self/environ")
	if err != nil {
		return nil // not Linux, or no /proc: nothing shows it
	}
	start, err := environStart()
	if err != nil {
		return err
	}
	memory, err := os.OpenFile("/proc/self/mem", os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("forget the environment: %w", err)
	}
	at := 0
	for entry := range bytes.SplitSeq(shown, []byte{0}) {
		for _, name := range names {
			if value, ok := bytes.CutPrefix(entry, []byte(name+"=")); ok && len(value) > 0 {
				if _, err = memory.WriteAt(bytes.Repeat([]byte{'x'}, len(value)), start+int64(at+len(name)+1)); err != nil {
					_ = memory.Close()
					return fmt.Errorf("forget %s: %w", name, err)
				}
			}
		}
		at += len(entry) + 1
	}
	return memory.Close()
}

// environStart is the address of this process's first environment variable: field 50 of its stat (proc(5)).
func environStart() (int64, error) {
	stat, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return 0, fmt.Errorf("forget the environment: %w", err)
	}
	// The second field is the program's name in parentheses and may hold anything.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	const environ = 50 - 3 // counted from the third field
	if len(fields) <= environ {
		return 0, fmt.Errorf("forget the environment: the kernel's stat has %d fields", len(fields)+2)
	}
	start, err := strconv.ParseInt(fields[environ], 10, 64)
	if err != nil || start == 0 {
		return 0, fmt.Errorf("forget the environment: its address is %q", fields[environ])
	}
	return start, nil
}
