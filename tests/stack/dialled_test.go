package stack

import (
	"net"
	"testing"
)

// A port that was given stays the test's own: what was given is claimed where another process sees it, which then takes another one.
func TestFreeAddressIsClaimed(t *testing.T) {
	for _, listen := range []string{"127.0.0.1:0", "[::1]:0"} {
		address := FreeAddress(t, listen)
		l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", address)
		if err != nil {
			t.Fatalf("the test itself can't listen on %s: %v", address, err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if claim, err := new(net.ListenConfig).ListenPacket(t.Context(), "udp", address); err == nil {
			t.Errorf("%s can be claimed again, so that another process gets it", address)
			_ = claim.Close()
		}
	}
}
