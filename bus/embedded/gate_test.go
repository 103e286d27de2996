package embedded

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// helloOf is a client that has begun a handshake; end ends it.
func helloOf(t *testing.T) (hello *tls.ClientHelloInfo, end context.CancelFunc) {
	t.Helper()
	// The context of a ClientHelloInfo can't be set from outside of crypto/tls: it is taken from a real handshake.
	server, client := net.Pipe()
	got := make(chan *tls.ClientHelloInfo, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_ = tls.Server(server, &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			got <- h
			<-ctx.Done()
			return nil, errors.New("enough")
		}}).HandshakeContext(ctx)
		_ = server.Close()
	}()
	go func() {
		_ = tls.Client(client, &tls.Config{MinVersion: tls.VersionTLS13, ServerName: "x"}).HandshakeContext(ctx)
		_ = client.Close()
	}()
	return <-got, cancel
}

func TestHandshakesWaitForTheirTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		var full atomic.Bool
		is := full.Load
		g.full.Store(&is)

		first, end := helloOf(t)
		if _, err := g.admit(first); err != nil {
			t.Fatalf("an open gate: %v", err)
		}
		if len(g.slots) != 1 {
			t.Fatalf("%d handshakes are under way", len(g.slots))
		}
		end()
		synctest.Wait()
		if len(g.slots) != 0 {
			t.Fatal("a handshake that has ended still counts")
		}

		full.Store(true)
		second, endSecond := helloOf(t)
		defer endSecond()
		admitted := make(chan error, 1)
		go func() { _, err := g.admit(second); admitted <- err }()
		synctest.Wait()
		select {
		case err := <-admitted:
			t.Fatalf("it did not wait: %v", err)
		default:
		}
		full.Store(false)
		if err := <-admitted; err != nil {
			t.Fatalf("when there is room: %v", err)
		}
		<-time.After(slotMost)
		synctest.Wait()
		if len(g.slots) != 0 {
			t.Error("a slow handshake counts for ever")
		}

		full.Store(true)
		third, endThird := helloOf(t)
		defer endThird()
		began := time.Now()
		if _, err := g.admit(third); !errors.Is(err, errGateFull) || time.Since(began) != gateWait {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
	})
}
