package link_test

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/link"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// lifeline is both ends of one, the child's over its file descriptor.
func lifeline(t *testing.T) (mine, child *link.Lifeline) {
	t.Helper()
	mine, file, err := link.NewLifeline()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mine.Close() })
	fd, err := syscall.Dup(int(file.Fd())) // as a child has it: a number that nothing in this process owns
	if err != nil {
		t.Fatal(err)
	}
	_ = file.Close()
	if child, err = link.InheritLifeline(fd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = child.Close() })
	return mine, child
}

func closesOnExec(t *testing.T, fd uintptr) bool {
	t.Helper()
	flags, _, errno := syscall.Syscall(syscall.SYS_FCNTL, fd, syscall.F_GETFD, 0)
	if errno != 0 {
		t.Fatal(errno)
	}
	return flags&syscall.FD_CLOEXEC != 0
}

func TestALifelineHandsConnectionsOver(t *testing.T) {
	mine, child := lifeline(t)
	if err := child.Greet(&runbusv1.ChildGreeting{PublicKey: []byte("key")}); err != nil {
		t.Fatal(err)
	}
	if g, err := mine.Greeting(time.Now().Add(time.Minute)); err != nil || string(g.GetPublicKey()) != "key" {
		t.Fatalf("%v, %v", g, err)
	}
	for range 3 {
		near, err := mine.Hand()
		if err != nil {
			t.Fatal(err)
		}
		far, err := child.Take()
		if err != nil {
			t.Fatal(err)
		}
		for _, end := range []net.Conn{near, far} {
			raw, err := end.(syscall.Conn).SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			if err := raw.Control(func(fd uintptr) {
				if !closesOnExec(t, fd) {
					t.Error("what this process starts inherits a link")
				}
			}); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := near.Write([]byte("ping")); err != nil {
			t.Fatal(err)
		}
		_ = near.Close() // no end of it is left here: the child reads to the end
		if b, err := io.ReadAll(far); err != nil || string(b) != "ping" {
			t.Errorf("%q, %v", b, err)
		}
		_ = far.Close()
	}
}

// However one side goes, the other one learns it.
func TestTheEndOfALifeline(t *testing.T) {
	mine, child := lifeline(t)
	_ = mine.Close()
	if _, err := child.Take(); !errors.Is(err, io.EOF) {
		t.Errorf("an orphan hears %v", err)
	}
	mine, child = lifeline(t)
	_ = child.Close()
	if _, err := mine.Greeting(time.Now().Add(time.Minute)); !errors.Is(err, io.EOF) {
		t.Errorf("without a child: %v", err)
	}
	if _, err := mine.Hand(); err == nil {
		t.Error("a link was handed to nobody")
	}
	mine, _ = lifeline(t)
	if _, err := mine.Greeting(time.Now().Add(-time.Second)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a child that says nothing: %v", err)
	}
}

func TestWhatIsNoLifeline(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	fd, err := syscall.Dup(int(r.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	_ = r.Close()
	for name, fd := range map[string]int{"a pipe": fd, "nothing": 1 << 16} {
		if l, err := link.InheritLifeline(fd); err == nil {
			_ = l.Close()
			t.Errorf("%s is taken for a lifeline", name)
		}
	}
}

// What comes on a lifeline and is no link is an error, and leaves no file behind.
func TestWhatIsNotHandedOver(t *testing.T) {
	open := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	for name, send := range map[string]func(t *testing.T, fd int) error{
		"a byte": func(_ *testing.T, fd int) error { return syscall.Sendmsg(fd, []byte("L"), nil, nil, 0) },
		"two connections": func(_ *testing.T, fd int) error {
			return syscall.Sendmsg(fd, []byte("L"), syscall.UnixRights(fd, fd), nil, 0)
		},
		"another word": func(_ *testing.T, fd int) error {
			return syscall.Sendmsg(fd, []byte("x"), syscall.UnixRights(fd), nil, 0)
		},
		"another file": func(t *testing.T, fd int) error {
			null, err := os.Open(os.DevNull)
			if err != nil {
				t.Fatal(err)
			}
			defer null.Close()
			return syscall.Sendmsg(fd, []byte("L"), syscall.UnixRights(int(null.Fd())), nil, 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer syscall.Close(fds[0]) //nolint:errcheck // of a test
			child, err := link.InheritLifeline(fds[1])
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = child.Close() }()
			before := open()
			if err := send(t, fds[0]); err != nil {
				t.Fatal(err)
			}
			if _, err := child.Take(); err == nil || errors.Is(err, io.EOF) {
				t.Errorf("it is taken: %v", err)
			}
			if after := open(); after != before {
				t.Errorf("%d files were open, and %d are", before, after)
			}
		})
	}
}
