package link

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"
)

// lastWords is how long what one end said before it closed may take to be written to the other.
const lastWords = 5 * time.Second

// Splice copies both ways between a and b until either ends, then closes both and returns when nothing is copied any more. What an end
// has said before it closed is written to the other one, for up to five seconds, also if that is saying something itself; whether it gets
// there is its network's matter, which may lose what was on the way when the other one is closed. The end of ctx closes both at once. The
// error is what ended it: nil for an orderly end of either, ctx's error for the end of ctx.
func Splice(ctx context.Context, a, b net.Conn) error {
	var ended, shut sync.Once
	var first error
	end := func(err error) { ended.Do(func() { first = err }) }
	shutDown := func() {
		shut.Do(func() {
			_ = a.Close() // which ends the copying; there is nobody to tell
			_ = b.Close()
		})
	}
	defer context.AfterFunc(ctx, func() { end(ctx.Err()); shutDown() })()
	var halves sync.WaitGroup
	var over [2]chan struct{}
	for i := range over {
		over[i] = make(chan struct{})
	}
	for i, way := range [2][2]net.Conn{{a, b}, {b, a}} {
		halves.Go(func() {
			unheard, err := forward(way[0], way[1])
			end(err)
			close(over[i])
			if unheard { // nobody reads there any more; what comes from there ends by itself
				timer := time.NewTimer(lastWords)
				defer timer.Stop()
				select {
				case <-over[1-i]:
				case <-timer.C:
				}
			}
			shutDown()
		})
	}
	halves.Wait()
	return first
}

// forward copies from to to; unheard says that it ended because to takes nothing. A pooled buffer, and never the connection's own ReadFrom:
// neither end is a plain socket.
func forward(from, to net.Conn) (unheard bool, err error) {
	buf, _ := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	w := &onlyWriter{to: to}
	_, err = io.CopyBuffer(w, onlyReader{from}, *buf)
	if errors.Is(err, io.ErrClosedPipe) || errors.Is(err, net.ErrClosed) {
		err = nil
	}
	return w.failed, err
}

// buffers are as large as a TLS record's plaintext, twice.
var buffers = sync.Pool{New: func() any { b := make([]byte, 32<<10); return &b }}

type onlyWriter struct {
	to     io.Writer
	failed bool
}

func (w *onlyWriter) Write(p []byte) (int, error) {
	n, err := w.to.Write(p)
	w.failed = err != nil
	return n, err
}

type onlyReader struct{ io.Reader }
