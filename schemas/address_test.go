package schemas_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/org-runink/runbus/schemas"
)

func TestAddressesAndTheirCanonicalForm(t *testing.T) {
	for in, want := range map[string]string{
		"192.0.2.7:7443":               "192.0.2.7:7443",
		"127.0.0.1:1":                  "127.0.0.1:1",
		"[2001:db8::7]:65535":          "[2001:db8::7]:65535",
		"[2001:DB8:0:0:0:0:0:7]:443":   "[2001:db8::7]:443",
		"[::1]:7443":                   "[::1]:7443",
		"[::ffff:192.0.2.7]:7443":      "192.0.2.7:7443",
		"edge.example.com:7443":        "edge.example.com:7443",
		"EDGE.Example.COM:7443":        "edge.example.com:7443",
		"localhost:7443":               "localhost:7443",
		"xn--bcher-kva.example:80":     "xn--bcher-kva.example:80",
		"1and1.example:80":             "1and1.example:80",
		"ip-10-0-0-12.ec2.internal:80": "ip-10-0-0-12.ec2.internal:80",
		// What clouds call hosts must not be taken for a key.
		"a1b2c3d4e5f60718.elb.us-east-1.amazonaws.com:443":            "a1b2c3d4e5f60718.elb.us-east-1.amazonaws.com:443",
		"k8s-default-runner-0a1b2c3d4e-0123456789abcdef.elb.aws:443":  "k8s-default-runner-0a1b2c3d4e-0123456789abcdef.elb.aws:443",
		"0d3c5e5e-1b2c-4f60-9a7b-0123456789ab.tunnel.example:443":     "0d3c5e5e-1b2c-4f60-9a7b-0123456789ab.tunnel.example:443",
		"runner-eu-central-1-production-datawarehouse.example.com:22": "runner-eu-central-1-production-datawarehouse.example.com:22",
	} {
		got, err := schemas.ParseAddress(in)
		if err != nil || got.String() != want {
			t.Errorf("%s: got %q, %v, want %q", in, got, err, want)
		}
	}
}

func TestAddressRefusalsSayWhatIsWrong(t *testing.T) {
	for in, want := range map[string]string{
		"":                          "empty",
		"edge.example.com":          "no port",
		"edge.example.com:":         "no port",
		":7443":                     "no host",
		"[2001:db8::7]":             "no port",
		"[2001:db8::7]:":            "no port",
		"[2001:db8::7]7443":         "between the bracket and the port",
		"[2001:db8::7:7443":         "does not close",
		"2001:db8::7]:7443":         "bracket in the wrong place",
		"edge:0":                    "1-65535",
		"edge:65536":                "1-65535",
		"edge:99999999999999999999": "1-65535",
		"edge:-1":                   "not a number",
		"edge:+80":                  "not a number",
		"edge:http":                 "not a number",
		"edge:0080":                 "begins with a zero",
		"https://edge:7443":         "URL scheme",
		"nats://edge:7443":          "URL scheme",
		"edge:7443/path":            "path",
		"edge:7443?x=1":             "path",
		"user:pass@edge:7443":       "user",
		"user@edge:7443":            "user",
		"https://u:p@edge:7443":     "user",
		"[fe80::1%eth0]:7443":       "zone",
		"2001:db8::7:7443":          "put an IPv6 address in brackets",
		"::1":                       "put an IPv6 address in brackets",
		"::ffff:192.0.2.7:7443":     "put an IPv6 address in brackets",
		"0.0.0.0:7443":              "unspecified",
		"[::]:7443":                 "unspecified",
		"[::ffff:0.0.0.0]:7443":     "unspecified",
		"224.0.0.1:7443":            "multicast",
		"239.255.255.255:7443":      "multicast",
		"[ff02::1]:7443":            "multicast",
		"[::ffff:224.0.0.1]:7443":   "multicast",
		"255.255.255.255:7443":      "broadcast",
		"256.0.0.1:7443":            "looks like an IPv4",
		"192.0.2:7443":              "looks like an IPv4",
		"192.0.2.07:7443":           "looks like an IPv4",
		"3232236039:7443":           "looks like an IPv4",
		"0x7f.1:7443":               "looks like an IPv4",
		"host.0x1f:7443":            "looks like an IPv4",
		"[edge.example.com]:7443":   "not an IPv6",
		"[192.0.2.7]:7443":          "not an IPv6",
		"[]:7443":                   "not an IPv6",
		"edge_1.example.com:7443":   "RFC 1123",
		"*.example.com:7443":        "RFC 1123",
		"edge..example.com:7443":    "empty label",
		".example.com:7443":         "empty label",
		"edge.example.com.:7443":    "ends with a dot",
		"-edge.example.com:7443":    "begins or ends with -",
		"edge-.example.com:7443":    "begins or ends with -",
		"bücher.example:7443":       "ASCII",
		"edge example:7443":         "space",
		" edge:7443":                "space",
		"edge:7443\n":               "space or a control",
		"edge\x00:7443":             "control",
		strings.Repeat("a", 64) + ".example:7443":             "63",
		strings.Repeat("abc.", 63) + "example:7443":           "253",
		strings.Repeat("abc.", 70) + "example:7443":           "253",
		"edge.example.com:7443,edge2.example.com:7443":        "more than one colon",
		strings.Repeat("x-", 20) + "y.example.com:7443:extra": "more than one colon",
	} {
		got, err := schemas.ParseAddress(in)
		if err == nil {
			t.Errorf("%q was taken as %q", in, got)
			continue
		}
		if !strings.Contains(err.Error(), want) || schemas.CodeOf(err) != schemas.CodeInvalid {
			t.Errorf("%q: %q does not say %q", in, err, want)
		}
	}
}

func TestAddressesThatHoldASecretAreNotRepeated(t *testing.T) {
	service, _, err := schemas.NewServiceToken("acme")
	if err != nil {
		t.Fatal(err)
	}
	seed := strings.TrimPrefix(service, "rsk1.acme.")
	ticket := schemas.Ticket{RunnerID: schemas.NewRunnerID(), Name: "edge"}.Encode()
	for _, secret := range []string{
		ticket, service, seed, strings.ToLower(seed), strings.ToUpper(ticket), schemas.NewSessionToken(),
		"eyJhbGciOiJFUzI1NiIsInR5cCI6IkpXVCJ9", "AKIAIOSFODNN7EXAMPLE", "ghp_0123456789abcdefghijABCDEFGHIJ012345",
		"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "Zm9vYmFyMTIzNDU2Nzg5MGFiY2RlZg",
		"-----BEGIN PRIVATE KEY-----", "sk-0123456789abcdefghijkl",
	} {
		for _, in := range []string{
			secret, secret + ":7443", secret + ".example.com:7443", "edge." + secret + ".example.com:7443", "edge:" + secret,
			"https://" + secret + "@edge:7443", "https://edge:7443/?token=" + secret, "[" + secret + "]:7443",
		} {
			_, err := schemas.ParseAddress(in)
			if err == nil {
				t.Fatalf("an address with a secret of %d bytes was taken", len(secret))
			}
			if text := fmt.Sprintf("%+v", err); strings.Contains(strings.ToLower(text), strings.ToLower(secret[:8])) {
				t.Errorf("the error repeats a secret of %d bytes", len(secret))
			}
		}
	}
	// Passwords look like nothing at all: no user is repeated.
	if _, err := schemas.ParseAddress("admin:hunter2@edge:7443"); err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Error(err)
	}
}

func TestAddressRoundTrip(t *testing.T) {
	label := rapid.StringMatching(`[a-z]([a-z-]{0,14}[a-z])?`)
	host := rapid.OneOf(
		rapid.Map(rapid.SliceOfN(label, 1, 5), func(l []string) string { return strings.Join(l, ".") }).Filter(looksLikeNoSecret),
		rapid.Map(rapid.SliceOfN(rapid.Byte(), 4, 4), func(b []byte) string { return netip.AddrFrom4([4]byte(b)).String() }),
		rapid.Map(rapid.SliceOfN(rapid.Byte(), 16, 16), func(b []byte) string { return netip.AddrFrom16([16]byte(b)).String() }),
	)
	rapid.Check(t, func(t *rapid.T) {
		a := schemas.Address{Host: host.Draw(t, "host"), Port: rapid.Uint16Min(1).Draw(t, "port")}
		if ip, err := netip.ParseAddr(a.Host); err == nil && (ip.IsUnspecified() || ip.IsMulticast() || ip.Is4In6() || ip == netip.MustParseAddr("255.255.255.255")) {
			return
		}
		got, err := schemas.ParseAddress(a.String())
		if err != nil || got != a {
			t.Fatalf("%q: %+v, %v", a, got, err)
		}
	})
}

// looksLikeNoSecret tells names that are taken from those in which a token might have been pasted: one in some ten thousand that chance
// makes of letters.
func looksLikeNoSecret(name string) bool {
	for _, beginning := range []string{"eyj", "akia", "glpat-", "sk-", "xoxa-", "xoxb-", "xoxp-", "xoxr-", "xoxs-"} {
		if strings.Contains(name, beginning) {
			return false
		}
	}
	return true
}

func FuzzParseAddress(f *testing.F) {
	for _, s := range []string{"192.0.2.7:7443", "[2001:db8::7]:7443", "edge.example.com:7443", "[fe80::1%eth0]:1", "u@h:1", "https://h:1", "[::ffff:224.0.0.1]:1", "h:0", "0x7f.1:1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := schemas.ParseAddress(s)
		if err != nil {
			if schemas.CodeOf(err) != schemas.CodeInvalid {
				t.Fatalf("code %s", schemas.CodeOf(err))
			}
			return
		}
		again, err := schemas.ParseAddress(a.String())
		if err != nil || again != a {
			t.Fatalf("%q gave %q, which gives %q, %v", s, a, again, err)
		}
		if ip, err := netip.ParseAddr(a.Host); err == nil && (ip.IsUnspecified() || ip.IsMulticast() || ip.Zone() != "") {
			t.Fatalf("%q gave %q", s, a)
		}
		if a.Port == 0 || strings.ContainsAny(a.String(), "@/%? \n") {
			t.Fatalf("%q gave %q", s, a)
		}
	})
}
