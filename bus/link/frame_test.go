package link_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// A frame is read whole and not a byte further: what follows is NATS.
func TestAFrameEndsWhereItEnds(t *testing.T) {
	var wire bytes.Buffer
	sent := &runbusv1.LinkPreface{RunnerId: "r-1", Tenant: "acme", Token: "t"}
	for _, m := range []proto.Message{sent, &runbusv1.LinkAnswer{}} {
		if err := link.WriteFrame(&wire, m); err != nil {
			t.Fatal(err)
		}
	}
	wire.WriteString("INFO {}")
	var preface runbusv1.LinkPreface
	if err := link.ReadFrame(&wire, &preface); err != nil || !proto.Equal(&preface, sent) {
		t.Fatalf("%v, %v", &preface, err)
	}
	if err := link.ReadFrame(&wire, &runbusv1.LinkAnswer{}); err != nil {
		t.Fatal(err)
	}
	if wire.String() != "INFO {}" {
		t.Errorf("%q is left", wire.String())
	}
}

func TestFramesThatAreNone(t *testing.T) {
	frame := func(n uint32, body string) io.Reader {
		return strings.NewReader(string(binary.BigEndian.AppendUint32(nil, n)) + body)
	}
	secret := "\x0a\xffcanary"
	for name, c := range map[string]struct {
		r    io.Reader
		want error
	}{
		"nothing":         {strings.NewReader(""), io.EOF},
		"half a length":   {strings.NewReader("\x00\x00"), io.ErrUnexpectedEOF},
		"half a body":     {frame(10, "abc"), io.ErrUnexpectedEOF},
		"no body":         {frame(10, ""), io.ErrUnexpectedEOF},
		"too long":        {frame(link.MaxFrame+1, ""), link.ErrFrame},
		"another thing":   {frame(uint32(len(secret)), secret), link.ErrFrame},
		"a NATS greeting": {strings.NewReader("INFO {}"), link.ErrFrame},
	} {
		err := link.ReadFrame(c.r, &runbusv1.LinkPreface{})
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		if strings.Contains(err.Error(), "canary") {
			t.Errorf("%s: the error repeats what came", name)
		}
	}
	long := &runbusv1.LinkPreface{Token: strings.Repeat("x", link.MaxFrame)}
	var wire bytes.Buffer
	if err := link.WriteFrame(&wire, long); !errors.Is(err, link.ErrFrame) || wire.Len() > 0 {
		t.Errorf("a frame that is too long: %v, %d bytes written", err, wire.Len())
	}
}

// FuzzPreface reads what anybody may send first.
func FuzzPreface(f *testing.F) {
	var wire bytes.Buffer
	if err := link.WriteFrame(&wire, &runbusv1.LinkPreface{RunnerId: "r", Token: "t"}); err != nil {
		f.Fatal(err)
	}
	f.Add(wire.Bytes())
	f.Add([]byte{0, 0, 0, 0})
	f.Add([]byte("INFO {}\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		var m runbusv1.LinkPreface
		if err := link.ReadFrame(r, &m); err != nil {
			return
		}
		if read, n := len(b)-r.Len(), binary.BigEndian.Uint32(b); read != int(n)+4 {
			t.Errorf("%d bytes were read of a frame of %d", read, n)
		}
	})
}

// conns are two ends of a socket.
func conns(t *testing.T) (a, b net.Conn) {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, _ := l.Accept()
		accepted <- c
	}()
	if a, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	b = <-accepted
	t.Cleanup(func() { _ = a.Close(); _ = b.Close() })
	return a, b
}

// Both halves of a splice end together, whichever side, or the context, ends first.
func TestASpliceEndsWhole(t *testing.T) {
	for _, ends := range []string{"left", "right", "context"} {
		left, a := conns(t)
		b, right := net.Pipe() // as into a server of the same process
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- link.Splice(ctx, a, b) }()
		for _, way := range [][2]net.Conn{{left, right}, {right, left}} {
			go func() { _, _ = way[0].Write([]byte("through")) }()
			got := make([]byte, 7)
			if _, err := io.ReadFull(way[1], got); err != nil || string(got) != "through" {
				t.Fatalf("%q, %v", got, err)
			}
		}
		switch ends {
		case "left":
			_ = left.Close()
		case "right":
			_ = right.Close()
		case "context":
			cancel()
		}
		err := <-done
		if ends == "context" && !errors.Is(err, context.Canceled) || ends != "context" && err != nil {
			t.Errorf("%s: %v", ends, err)
		}
		for name, end := range map[string]net.Conn{"left": left, "right": right} {
			if name == ends {
				continue
			}
			_ = end.SetReadDeadline(time.Now().Add(30 * time.Second))
			if _, err := end.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("%s ended, and %s goes on: %v", ends, name, err)
			}
		}
		cancel()
		_ = right.Close()
	}
}

// What an end says before it closes reaches the other one, though that is saying something at the same time.
func TestASpliceDeliversLastWords(t *testing.T) {
	for range 200 {
		client, a := net.Pipe()
		b, server := net.Pipe()
		done := make(chan error, 1)
		go func() { done <- link.Splice(t.Context(), a, b) }()
		written := make(chan struct{})
		go func() {
			defer close(written)
			_, _ = client.Write([]byte("on its way")) // taken by the splice, and read by nobody
		}()
		<-written
		if _, err := server.Write([]byte("bye")); err != nil {
			t.Fatal(err)
		}
		_ = server.Close()
		for range 20 {
			runtime.Gosched() // until the splice has noticed
		}
		if got, err := io.ReadAll(client); err != nil || string(got) != "bye" {
			t.Fatalf("the client heard %q, %v", got, err)
		}
		if err := <-done; err != nil {
			t.Errorf("the splice ended with %v", err)
		}
		_ = client.Close()
	}
}

// What a runner answers is the error that the dialler gets, and an answer that never comes ends in time.
func TestAnOfferIsAnswered(t *testing.T) {
	for _, want := range []error{nil, link.ErrLinkedElsewhere()} {
		near, far := conns(t)
		go func() {
			p, err := link.Receive(far, time.Now().Add(30*time.Second))
			if err != nil || p.GetRunnerId() != "r-1" {
				t.Errorf("received %v, %v", p, err)
			}
			if want != nil {
				link.Refuse(far, want)
				return
			}
			if err := link.Take(far); err != nil {
				t.Error(err)
			}
		}()
		err := link.Offer(near, time.Now().Add(30*time.Second), &runbusv1.LinkPreface{RunnerId: "r-1"})
		if schemas.CodeOf(err) != schemas.CodeOf(want) || want != nil && err.Error() != "linked elsewhere" {
			t.Errorf("%v, want %v", err, want)
		}
	}
	near, _ := conns(t)
	if err := link.Offer(near, time.Now().Add(10*time.Millisecond), &runbusv1.LinkPreface{}); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("an answer that never comes: %v", err)
	}
}

func TestUserTimeoutIsForSockets(t *testing.T) {
	a, _ := conns(t)
	b, _ := net.Pipe()
	for _, c := range []net.Conn{a, b} {
		if err := link.SetUserTimeout(c, link.UserTimeout); err != nil {
			t.Errorf("%T: %v", c, err)
		}
	}
}
