package managed

import (
	"bytes"
	"net"
	"net/netip"
	"strings"
	"testing"
)

// What a stranger's runner may not reach includes the host's own public addresses, whatever they are.
func TestStrangersReachNoOwnAddress(t *testing.T) {
	own := []net.Addr{
		&net.IPNet{IP: net.ParseIP("8.8.4.4"), Mask: net.CIDRMask(24, 32)},
		&net.IPNet{IP: net.ParseIP("2a00:1450::7"), Mask: net.CIDRMask(64, 128)},
		&net.UnixAddr{Name: "x"},
	}
	rest, ok := bytes.CutPrefix(policyOn(own), strangersPolicy)
	if want := "  - name: own-addresses-1\n    cidrs: [\"8.8.4.4/32\", \"2a00:1450::7/128\"]\n"; !ok || string(rest) != want {
		t.Errorf("%q is added, want %q", rest, want)
	}
	if !bytes.Equal(policyOn(nil), strangersPolicy) {
		t.Error("a host without an address has a policy with some")
	}
	here, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	text := string(policyOn(here))
	for _, a := range here {
		prefix, err := netip.ParsePrefix(a.String())
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(text, `"`+netip.PrefixFrom(prefix.Addr(), prefix.Addr().BitLen()).String()+`"`) {
			t.Errorf("%s is not in the policy", prefix.Addr())
		}
	}
}
