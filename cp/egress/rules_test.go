package egress

import (
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

func list(t *testing.T, text string) []Entry {
	t.Helper()
	entries, err := Parse("LIST", text)
	if err != nil {
		t.Fatal(err)
	}
	return entries
}

// check compares what the rules say to each address with a part of the rule, "" for none.
func check(t *testing.T, r Rules, want map[string]string) {
	t.Helper()
	for to, rule := range want {
		got := r.Refuses(netip.MustParseAddrPort(to))
		if (rule == "") != (got == "") || !strings.Contains(got, rule) {
			t.Errorf("%s: %q, want %q", to, got, rule)
		}
	}
}

// What holds without any setting: one machine, where runners listen on loopback beside the control plane.
func TestWithoutSettings(t *testing.T) {
	own := []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:7100"), netip.MustParseAddrPort("[::]:4222")}
	check(t, Rules{Own: func() []netip.AddrPort { return own }}, map[string]string{
		"127.0.0.1:7443": "", "[::1]:7443": "", "10.0.0.5:22": "", "[2001:db8::1]:7443": "",
		"127.0.0.1:7100": "itself", "[::ffff:127.0.0.1]:7100": "itself", "127.0.0.2:7100": "", "127.0.0.2:4222": "itself", "[::1]:4222": "itself",
		"10.0.0.5:4222": "", "0.0.0.0:7443": "no single host", "[::]:7443": "no single host", "224.0.0.1:1": "no single host", "255.255.255.255:1": "no single host",
		"169.254.169.254:80": "169.254.0.0/16", "[fe80::1]:7443": "fe80::/10", "[64:ff9b::a9fe:a9fe]:80": "embedded",
	})
	check(t, Rules{}, map[string]string{"127.0.0.1:7100": "", "169.254.169.254:80": "link-local", "10.0.0.1:1": ""})
}

// On a control plane that others reach, nothing of its host is dialled that the operator did not name.
func TestASharedControlPlaneKeepsItsHostToItself(t *testing.T) {
	mine := ownAddress(t)
	const closed = "own host"
	check(t, Rules{Shared: true}, map[string]string{
		"127.0.0.1:7443": closed, "127.9.9.9:22": closed, "[::1]:7443": closed, "[::ffff:127.0.0.1]:7443": closed, "0.0.0.1:80": closed,
		"[64:ff9b::127.0.0.1]:7443": closed, netip.AddrPortFrom(mine, 22).String(): closed, "10.255.1.2:7443": "",
	})
	// A wide entry means other hosts; one by one this one's are opened, but never the listeners of the control plane.
	own := func() []netip.AddrPort { return []netip.AddrPort{netip.MustParseAddrPort("0.0.0.0:7100")} }
	r := Rules{Shared: true, Own: own, Allow: list(t, "*, 0.0.0.0/0, ::/0, 127.0.0.0/30:7443, "+mine.String())}
	check(t, r, map[string]string{
		"127.0.0.1:7443": "", "127.0.0.1:7444": closed, "127.0.0.9:7443": closed, "[::1]:7443": closed, netip.AddrPortFrom(mine, 22).String(): "",
		netip.AddrPortFrom(mine, 7100).String(): "itself", "10.255.1.2:7443": "",
	})
}

// ownAddress is an address of this host beside loopback, or of loopback if it has no other.
func ownAddress(t *testing.T) netip.Addr {
	t.Helper()
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	mine := netip.MustParseAddr("127.0.0.1")
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.IsGlobalUnicast() {
			mine = netip.MustParseAddr(n.IP.String())
		}
	}
	return mine
}

func TestTheLists(t *testing.T) {
	check(t, Rules{Deny: list(t, "10.0.0.0/8,[2001:db8::/32]:22-80,*:25,192.0.2.7")}, map[string]string{
		"10.1.2.3:7443": EnvDeny + " has 10.0.0.0/8", "[::ffff:10.1.2.3]:7443": "10.0.0.0/8", "[64:ff9b::10.1.2.3]:7443": "10.0.0.0/8", "11.0.0.1:7443": "",
		"[2001:db8::1]:22": "[2001:db8::/32]:22-80", "[2001:db8::1]:81": "", "198.51.100.1:25": "*:25", "192.0.2.7:1": "has 192.0.2.7", "192.0.2.8:1": "",
	})
	check(t, Rules{Allow: list(t, "10.0.0.0/8:7443, 2001:db8::/32"), Deny: list(t, "10.9.0.0/16")}, map[string]string{
		"10.1.2.3:7443": "", "10.1.2.3:22": EnvAllow, "10.9.0.1:7443": EnvDeny, "[2001:db8::1]:22": "", "192.0.2.1:7443": EnvAllow,
		"[64:ff9b::10.1.2.3]:7443": EnvAllow, "127.0.0.1:7443": EnvAllow,
	})
	// Metadata can't be allowed.
	check(t, Rules{Allow: list(t, "169.254.169.254,*")}, map[string]string{"169.254.169.254:80": "169.254.0.0/16"})
}

func TestListsThatAreWrong(t *testing.T) {
	for text, want := range map[string]string{
		",": "no entry", "edge.example.com": "names are resolved", "edge.example.com:7443": "names are resolved", "10.0.0.1/8": "did you mean 10.0.0.0/8",
		"10.0.0.0/8:": "colon", "10.0.0.0/8:0": "port", "10.0.0.0/8:99999": "port", "10.0.0.0/8:9-8": "port", "10.0.0.0/8:a": "port",
		"[::1": "bracket", "[::1]x": "bracket", "[::1]:": "bracket", "[10.0.0.1]:80": "bracket", "fe80::1%eth0": "names are resolved", "10.0.0.0/33": "names are resolved",
		"10.0.0.0/8,x" + strings.Repeat("y", 200): "…", strings.Repeat("*,", 1001): "more than 1000",
	} {
		_, err := Parse("LIST", text)
		if schemas.CodeOf(err) != schemas.CodeInvalid || !strings.HasPrefix(err.Error(), "LIST") || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40q: %v, want %q", text, err, want)
		}
	}
	if entries, err := Parse("LIST", ""); entries != nil || err != nil {
		t.Error(entries, err)
	}
}

// An entry that is read matches every address of its prefix, in whatever form that is written.
func FuzzParse(f *testing.F) {
	for _, s := range []string{"10.0.0.0/8", "*:7443", "[2001:db8::/32]:7443-7450", "::1", "::ffff:10.0.0.0/104", "127.0.0.1:1,*", "[", ":", "1:2"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		entries, err := Parse("LIST", text)
		if err != nil {
			if schemas.CodeOf(err) != schemas.CodeInvalid || len(entries) > 0 {
				t.Fatal(entries, err)
			}
			return
		}
		for _, e := range entries {
			again, err := Parse("LIST", e.String())
			if err != nil || len(again) != 1 || again[0] != e {
				t.Fatalf("%q is read again as %v, %v", e, again, err)
			}
			at := e.prefix.Addr()
			if e.any {
				at = netip.MustParseAddr("192.0.2.1")
			}
			if !e.matches(netip.AddrPortFrom(at, e.first)) || e.first > 1 && e.matches(netip.AddrPortFrom(at, e.first-1)) {
				t.Fatalf("%q does not match itself", e)
			}
			if rule := (Rules{Deny: []Entry{e}}).Refuses(netip.AddrPortFrom(at, e.last)); rule == "" {
				t.Fatalf("%q denies nothing", e)
			}
		}
	})
}
