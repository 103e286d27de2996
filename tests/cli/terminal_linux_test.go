package cli

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/org-runink/runbus/tests/stack"
)

// terminal is a program with a terminal of its own, as a person has it.
type terminal struct {
	keyboard *os.File
	screen   chan []byte // what came, piece by piece; closed at the end
	seen     bytes.Buffer
	cmd      *exec.Cmd
}

func ioctl(t *testing.T, f *os.File, request uintptr, value *uint32) {
	t.Helper()
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(value))); errno != 0 {
		t.Fatal(errno)
	}
}

func onTerminal(t *testing.T, env map[string]string, path string, args ...string) *terminal {
	t.Helper()
	keyboard, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	var unlock, number uint32
	ioctl(t, keyboard, syscall.TIOCSPTLCK, &unlock)
	ioctl(t, keyboard, syscall.TIOCGPTN, &number)
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	p := &terminal{keyboard: keyboard, screen: make(chan []byte, 1024), cmd: exec.Command(path, args...)}
	p.cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "TERM=xterm", "HOME=" + t.TempDir()}
	for k, v := range env {
		p.cmd.Env = append(p.cmd.Env, k+"="+v)
	}
	p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = tty, tty, tty
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = tty.Close()
	go func() {
		defer close(p.screen)
		for {
			b := make([]byte, 4096)
			n, err := keyboard.Read(b)
			if err != nil {
				return // EIO: nobody holds the other end any more
			}
			p.screen <- b[:n]
		}
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
		_ = keyboard.Close()
		stack.Inspect(t, "the screen", p.seen.Bytes(), nil)
	})
	return p
}

// await reads the screen until text is on it.
func (p *terminal) await(t *testing.T, text string) {
	t.Helper()
	if !p.shows(t, text) {
		t.Fatalf("it ended without %q:\n%q", text, p.seen.String())
	}
}

// shows reads the screen until one of texts is on it, or until the program has ended.
func (p *terminal) shows(t *testing.T, texts ...string) bool {
	t.Helper()
	timeout := time.After(stack.Patience)
	for !slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(p.seen.String(), text) }) {
		select {
		case b, open := <-p.screen:
			if !open {
				return false
			}
			p.seen.Write(b)
		case <-timeout:
			t.Fatalf("no %q on the screen:\n%q", texts, p.seen.String())
		}
	}
	return true
}

// awaitOr reads the screen until the event, or until the program has ended.
func (p *terminal) awaitOr(t *testing.T, what string, event <-chan struct{}) bool {
	t.Helper()
	timeout := time.After(stack.Patience)
	for {
		select {
		case <-event:
			return true
		case b, open := <-p.screen:
			if !open {
				return false
			}
			p.seen.Write(b)
		case <-timeout:
			t.Fatalf("waited for %s:\n%q", what, p.seen.String())
		}
	}
}

func (p *terminal) exit(t *testing.T) int {
	t.Helper()
	timeout := time.After(stack.Patience)
	for open := true; open; {
		var b []byte
		select {
		case b, open = <-p.screen:
			p.seen.Write(b)
		case <-timeout:
			t.Fatalf("it has not ended:\n%q", p.seen.String())
		}
	}
	_ = p.cmd.Wait() // the state is read from ProcessState
	return p.cmd.ProcessState.ExitCode()
}

// On a terminal a bar shows how a fetch goes, and Ctrl-C cancels it down to the source, with the outcome, in every format.
func TestCtrlCOnATerminal(t *testing.T) {
	u := startUp(t, t.TempDir(), filepath.Join(t.TempDir(), "data"))
	url, opened, gone := held(t)
	for _, format := range []string{"table", "json", "csv"} {
		dir := t.TempDir()
		out := filepath.Join(dir, "out")
		if err := os.WriteFile(out, []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
		status, screen := 0, ""
		stack.Again(t, u.Stderr, func() (int, string) {
			p := onTerminal(t, u.env, u.bin.Runink, "fetch", "run", "--runner", "local", "--source", "http", "--set", "url="+url, "--set", "format=jsonl",
				"--format", format, "--out", out)
			began := p.awaitOr(t, "the request", opened)
			if began && p.shows(t, "\x1b") { // the bar moves the cursor
				_, _ = p.keyboard.WriteString("\x03") // what has ended meanwhile does not read it
			}
			status, screen = p.exit(t), p.seen.String()
			if began {
				await(t, "the source's client to go", gone)
			}
			return status, screen
		})
		if status != 1 || !strings.Contains(screen, "cancelled") {
			t.Errorf("%s: status %d, %q", format, status, screen)
		}
		entries, err := os.ReadDir(dir)
		if b, readErr := os.ReadFile(out); err != nil || readErr != nil || string(b) != "old" || len(entries) != 1 {
			t.Errorf("%s: %q beside %v (%v %v)", format, b, entries, err, readErr)
		}
	}
	p := onTerminal(t, u.env, u.bin.Runink, "fetch", "run", "--runner", "local", "--source", "http", "--set", "url="+url, "--format", "arrow")
	if status := p.exit(t); status != 2 || !strings.Contains(p.seen.String(), "Arrow is binary") {
		t.Errorf("Arrow on a terminal: status %d, %q", status, p.seen.String())
	}
	u.Stop(t)
}

// Ctrl-C reaches `up` alone, which stops its children in order.
func TestCtrlCStopsUp(t *testing.T) {
	bin := binaries(t)
	p := onTerminal(t, nil, bin.Runink, "up", "--data-dir", filepath.Join(t.TempDir(), "data"), "--http", "127.0.0.1:0", "--nats", "127.0.0.1:0")
	p.await(t, "Ctrl-C stops it.")
	if _, err := p.keyboard.WriteString("\x03"); err != nil {
		t.Fatal(err)
	}
	if status := p.exit(t); status != 0 || !strings.Contains(p.seen.String(), "control plane has stopped") {
		t.Errorf("status %d, %q", status, p.seen.String())
	}
}
