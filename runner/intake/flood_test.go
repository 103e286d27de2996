package intake

import (
	"flag"
	"io"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

var flood = flag.Int("flood", 400, "connections that never finish the handshake")

// Connections that never finish the handshake are cut in time, from one address and from many, and a real link comes up among them and
// right after them. The full size of the requirement is -flood=10000.
func TestAFloodOfHalfHandshakes(t *testing.T) {
	floods := map[string]int{"one address": 1}
	if runtime.GOOS == "linux" { // where all of 127.0.0.0/8 is this host's
		floods["many addresses"] = 1000
	}
	for from, addresses := range floods {
		t.Run(from, func(t *testing.T) { floodFrom(t, addresses) })
	}
}

func floodFrom(t *testing.T, addresses int) {
	const within = HandshakeWithin // in which a link must come up, too
	p := newPair(t)
	slot, arrived := newSlot(always)
	var i *Intake
	t.Cleanup(func() { // after Serve has ended: who sees its connection cut may do so before it is no longer counted
		if now, _ := i.gate.open(); now != 0 {
			t.Errorf("%d connections are still counted", now)
		}
	})
	var address string
	i, address = open(t, p, slot, func(c *Config) { c.HandshakeWithin = within })
	var dawdling sync.WaitGroup
	defer dawdling.Wait()
	var longest atomic.Int64
	began := time.Now()
	for n := range *flood {
		source := netip.AddrFrom4([4]byte{127, 0, byte(n % addresses / 250), byte(1 + n%addresses%250)})
		conn, err := (&net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(source, 0))}).DialContext(t.Context(), "tcp", address)
		if err != nil {
			t.Fatalf("connection %d: %v", n, err)
		}
		if n%2 == 0 { // some begin one
			_, _ = conn.Write([]byte{22, 3, 1})
		}
		connected := time.Now()
		dawdling.Go(func() {
			defer conn.Close()
			_ = conn.SetReadDeadline(time.Now().Add(within + patience))
			if _, err := io.Copy(io.Discard, conn); err != nil && isTimeout(err) {
				t.Error("a connection was not cut")
			}
			for took := int64(time.Since(connected)); ; {
				most := longest.Load()
				if took <= most || longest.CompareAndSwap(most, took) {
					return
				}
			}
		})
		if n == *flood/2 {
			if _, err := dial(t, p, address, "a"); err != nil {
				t.Errorf("a link in the middle of the flood: %v", err)
			}
			<-arrived
		}
	}
	now, evicted := i.gate.open()
	if now > Total || addresses == 1 && now > PerAddress || *flood > 2*Total && evicted == 0 || *flood > 2*PerAddress*addresses && evicted == 0 {
		t.Errorf("%d connections are open, %d were put out", now, evicted)
	}
	sent := time.Now()
	if _, err := dial(t, p, address, "a"); err != nil {
		t.Fatalf("a link right after the flood: %v", err)
	}
	linked := time.Since(sent)
	<-arrived
	dawdling.Wait()
	t.Logf("%d connections of %d addresses in %s: %d open at the end, %d were put out, the longest was cut after %s of %s; a link right after them took %s", *flood, addresses,
		sent.Sub(began).Round(time.Millisecond), now, evicted, time.Duration(longest.Load()).Round(time.Millisecond), within, linked.Round(time.Millisecond))
}
