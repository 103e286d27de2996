package link

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
)

// Splice copies both ways between a and b until either ends, then closes both and returns when nothing is copied any more. The end
// of ctx closes them too. Its error is what ended it: nil for an orderly end of either, ctx's error for the end of ctx.
func Splice(ctx context.Context, a, b net.Conn) error {
	var once sync.Once
	var first error
	end := func(err error) {
		once.Do(func() {
			first = err
			_ = a.Close() // which ends the copying; there is nobody to tell
			_ = b.Close()
		})
	}
	defer context.AfterFunc(ctx, func() { end(ctx.Err()) })()
	var halves sync.WaitGroup
	for _, way := range [][2]net.Conn{{a, b}, {b, a}} {
		halves.Go(func() { end(forward(way[0], way[1])) })
	}
	halves.Wait()
	return first
}

// forward copies from to to. A pooled buffer, and never the connection's own ReadFrom: neither end is a plain socket.
func forward(from, to net.Conn) error {
	buf, _ := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	_, err := io.CopyBuffer(onlyWriter{to}, onlyReader{from}, *buf)
	if errors.Is(err, io.ErrClosedPipe) || errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// buffers are as large as a TLS record's plaintext, twice.
var buffers = sync.Pool{New: func() any { b := make([]byte, 32<<10); return &b }}

type onlyWriter struct{ io.Writer }

type onlyReader struct{ io.Reader }
