package link

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Lifeline is one end of the socket between a control plane and a runner that it started as its child. Nobody else can get at it: it
// has no name, and no process but the two has an end. The child says who it is, once (Greet, Greeting); then links are handed to it
// (Hand, Take). When one side is gone, however it went, the other one reads io.EOF. Close ends it, at any time; beside that each
// side is used by one goroutine at a time.
type Lifeline struct{ conn *net.UnixConn }

// handed is the byte that carries a link.
const handed = 'L'

// NewLifeline makes a socket: the end of the control plane, and the child's, a file to start it with, which the caller closes.
func NewLifeline() (*Lifeline, *os.File, error) {
	conn, child, err := pair()
	if err != nil {
		return nil, nil, err
	}
	return &Lifeline{conn}, child, nil
}

// InheritLifeline takes the end that this process was started with over from the file descriptor. What this process starts does not
// inherit it.
func InheritLifeline(fd int) (*Lifeline, error) {
	syscall.CloseOnExec(fd)
	f := os.NewFile(uintptr(fd), "lifeline")
	if f == nil {
		return nil, fmt.Errorf("%d is no file descriptor", fd)
	}
	defer f.Close()
	conn, err := unixConn(f)
	if err != nil {
		return nil, fmt.Errorf("file descriptor %d: %w", fd, err)
	}
	return &Lifeline{conn}, nil
}

// Close ends the lifeline.
func (l *Lifeline) Close() error { return l.conn.Close() }

// Greet says the child's word.
func (l *Lifeline) Greet(g *runbusv1.ChildGreeting) error { return WriteFrame(l.conn, g) }

// Greeting waits for it until the deadline.
func (l *Lifeline) Greeting(deadline time.Time) (*runbusv1.ChildGreeting, error) {
	if err := l.conn.SetReadDeadline(deadline); err != nil {
		return nil, err
	}
	g := new(runbusv1.ChildGreeting)
	if err := ReadFrame(l.conn, g); err != nil {
		return nil, err
	}
	return g, l.conn.SetReadDeadline(time.Time{})
}

// Hand gives the child one end of a new connection and returns the other one.
func (l *Lifeline) Hand() (net.Conn, error) {
	conn, child, err := pair()
	if err != nil {
		return nil, err
	}
	defer child.Close() // sent by then: the child has its own
	n, _, err := l.conn.WriteMsgUnix([]byte{handed}, syscall.UnixRights(int(child.Fd())), nil)
	if err == nil && n != 1 {
		err = io.ErrShortWrite
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

// Take waits for the next connection that is handed over. It is io.EOF when the control plane is gone.
func (l *Lifeline) Take() (net.Conn, error) {
	said, rights := make([]byte, 1), make([]byte, syscall.CmsgSpace(4))
	n, size, flags, _, err := l.conn.ReadMsgUnix(said, rights)
	switch {
	case err != nil:
		return nil, err
	case n == 0:
		return nil, io.EOF
	}
	conn, err := received(rights[:size])
	if err == nil && (said[0] != handed || flags&syscall.MSG_CTRUNC != 0) {
		_ = conn.Close()
		err = ErrFrame
	}
	if err != nil {
		return nil, err
	}
	return conn, nil
}

// received is the one connection in a message; whatever else came with it is closed.
func received(rights []byte) (net.Conn, error) {
	messages, err := syscall.ParseSocketControlMessage(rights)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrFrame, err)
	}
	var files []*os.File
	for i := range messages {
		fds, err := syscall.ParseUnixRights(&messages[i])
		if err != nil {
			continue // another kind of message
		}
		for _, fd := range fds {
			syscall.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "link"))
		}
	}
	defer func() {
		for _, f := range files {
			_ = f.Close()
		}
	}()
	if len(files) != 1 {
		return nil, fmt.Errorf("%w: %d connections are handed over at once", ErrFrame, len(files))
	}
	return unixConn(files[0])
}

// pair is a connected pair of sockets: this process's end, and one to give away. Nothing that is started meanwhile inherits them.
func pair() (*net.UnixConn, *os.File, error) {
	syscall.ForkLock.RLock()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err == nil {
		syscall.CloseOnExec(fds[0])
		syscall.CloseOnExec(fds[1])
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	mine, given := os.NewFile(uintptr(fds[0]), "link"), os.NewFile(uintptr(fds[1]), "link")
	defer mine.Close() // unixConn has its own
	conn, err := unixConn(mine)
	if err != nil {
		_ = given.Close()
		return nil, nil, err
	}
	return conn, given, nil
}

// unixConn is a connection over a copy of the file's descriptor.
func unixConn(f *os.File) (*net.UnixConn, error) {
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	unix, ok := conn.(*net.UnixConn)
	if !ok {
		_ = conn.Close()
		return nil, errors.New("not the socket of a child process")
	}
	return unix, nil
}
