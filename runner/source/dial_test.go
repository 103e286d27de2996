package source

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/schemas"
)

func TestGuardedDialRefuses(t *testing.T) {
	dial := GuardedDial(nil)
	for host, rule := range map[string]string{
		"169.254.169.254":                  "169.254.0.0/16",
		"169.254.170.2":                    "169.254.0.0/16",
		"169.254.0.1":                      "169.254.0.0/16",
		"100.100.100.200":                  "Alibaba",
		"168.63.129.16":                    "Azure",
		"192.0.0.192":                      "Oracle",
		"fd00:ec2::254":                    "AWS",
		"fd00:ec2::23":                     "AWS",
		"fd20:ce::254":                     "Google",
		"fe80::1":                          "fe80::/10",
		"fe80::1%lo":                       "fe80::/10",
		"febf::1":                          "fe80::/10",
		"::ffff:169.254.169.254":           "169.254.0.0/16",
		"::ffff:a9fe:a9fe":                 "169.254.0.0/16",
		"0:0:0:0:0:ffff:a9fe:a9fe":         "169.254.0.0/16",
		"::169.254.169.254":                "embedded",
		"::ffff:0:169.254.169.254":         "embedded",
		"64:ff9b::169.254.169.254":         "embedded",
		"64:ff9b::a9fe:a9fe":               "embedded",
		"64:ff9b:1::a9fe:a9fe":             "embedded",
		"64:ff9b:1:a9fe:a9:fe00::":         "embedded",
		"2002:a9fe:a9fe::1":                "embedded",
		"2001:0:a9fe:a9fe::1":              "embedded",
		"2001::5601:5601":                  "embedded", // Teredo client, inverted
		"2001:db8::5efe:a9fe:a9fe":         "embedded",
		"2001:db8::200:5efe:168.63.129.16": "embedded",
		"metadata.google.internal":         "name of a cloud-metadata service",
		"METADATA.Google.Internal.":        "name of a cloud-metadata service",
		"x.metadata.google.internal":       "name of a cloud-metadata service",
		"metadata.goog":                    "name of a cloud-metadata service",
		"instance-data.ec2.internal":       "name of a cloud-metadata service",
		"2852039166":                       "not a dotted IPv4 address",
		"0xA9FEA9FE":                       "not a dotted IPv4 address",
		"025177524776":                     "not a dotted IPv4 address",
		"0251.0376.0251.0376":              "not a dotted IPv4 address",
		"0xa9.0xfe.0xa9.0xfe":              "not a dotted IPv4 address",
		"169.254.43518":                    "not a dotted IPv4 address",
		"169.16689662":                     "not a dotted IPv4 address",
		"169.254.169.254.":                 "not a dotted IPv4 address",
		"127.1":                            "not a dotted IPv4 address",
	} {
		for _, network := range []string{"tcp", "tcp4", "tcp6"} {
			if network == "tcp4" && strings.Contains(host, ":") || network == "tcp6" && strings.Contains(rule, "/16") {
				continue // the resolver itself finds no address of that family
			}
			if ip, err := netip.ParseAddr(host); err == nil && ip.Is4() && network == "tcp6" {
				continue
			}
			conn, err := dial(t.Context(), network, net.JoinHostPort(host, "80"))
			if err == nil {
				_ = conn.Close()
			}
			if schemas.CodeOf(err) != schemas.CodeForbiddenHop || !strings.Contains(err.Error(), rule) {
				t.Errorf("%s %s: %v, want %q", network, host, err, rule)
			}
			if strings.Contains(err.Error(), "(::ffff:169.") {
				t.Errorf("an IPv4 address is told in the form of IPv6: %v", err)
			}
		}
	}
}

func TestGuardedDialRefusesOtherNetworks(t *testing.T) {
	for _, network := range []string{"unix", "udp", "ip", ""} {
		if _, err := GuardedDial(nil)(t.Context(), network, "127.0.0.1:80"); schemas.CodeOf(err) != schemas.CodeForbiddenHop {
			t.Errorf("%q: %v", network, err)
		}
	}
	for _, addr := range []string{"", "127.0.0.1", ":80"} {
		if _, err := GuardedDial(nil)(t.Context(), "tcp", addr); schemas.CodeOf(err) != schemas.CodeBadSource {
			t.Errorf("%q: %v", addr, err)
		}
	}
}

// TestGuardedDialResolvesOnce has a name server whose answers change: first an address that is allowed, then metadata. What was
// checked is what is dialled, and one bad address among good ones refuses the name.
func TestGuardedDialResolvesOnce(t *testing.T) {
	target := listen(t)
	names := &nameServer{answers: map[string][][]string{
		"flips.test.": {{"127.0.0.1"}, {"169.254.169.254"}},
		"mixed.test.": {{"127.0.0.1", "169.254.169.254"}},
		"bad.test.":   {{"168.63.129.16"}},
		"none.test.":  {{}},
	}}
	dial := GuardedDial(&net.Dialer{Resolver: names.start(t)})
	addr := func(host string) string { return host + target.Addr().String()[len("127.0.0.1"):] }

	conn, err := dial(t.Context(), "tcp4", addr("flips.test."))
	if err != nil {
		t.Fatal(err)
	}
	if got := conn.RemoteAddr().String(); got != target.Addr().String() {
		t.Errorf("dialled %s", got)
	}
	_ = conn.Close()
	for _, host := range []string{"flips.test.", "mixed.test.", "bad.test."} {
		if _, err := dial(t.Context(), "tcp4", addr(host)); schemas.CodeOf(err) != schemas.CodeForbiddenHop {
			t.Errorf("%s: %v", host, err)
		}
	}
	if _, err := dial(t.Context(), "tcp4", addr("none.test.")); err == nil || schemas.CodeOf(err) == schemas.CodeForbiddenHop {
		t.Errorf("none: %v", err)
	}
}

func TestGuardedDialTriesEachAddress(t *testing.T) {
	target := listen(t)
	names := &nameServer{answers: map[string][][]string{"two.test.": {{"127.0.0.2", "127.0.0.1"}}}}
	conn, err := GuardedDial(&net.Dialer{Resolver: names.start(t)})(t.Context(), "tcp4", "two.test."+target.Addr().String()[len("127.0.0.1"):])
	if err != nil {
		t.Fatal(err)
	}
	_ = conn.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := GuardedDial(nil)(ctx, "tcp", target.Addr().String()); err == nil {
		t.Error("dialled with a context that has ended")
	}
}

// A dial that fails at the deadline fails after the context has ended: else a fetch whose time is over looks like one whose source can't
// be reached.
func TestGuardedDialEndsAfterItsContext(t *testing.T) {
	target := listen(t)
	dial := GuardedDial(nil)
	for within := time.Duration(0); within < 2*time.Millisecond; within += 4 * time.Microsecond {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		conn, err := dial(ctx, "tcp4", target.Addr().String())
		if err == nil {
			_ = conn.Close()
		} else if ctx.Err() == nil {
			t.Errorf("within %s: %v", within, err)
		}
		cancel()
	}
}

func listen(t *testing.T) net.Listener {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// nameServer answers A questions over TCP: for each name its answers in turn, the last one again and again.
type nameServer struct{ answers map[string][][]string }

func (n *nameServer) start(t *testing.T) *net.Resolver {
	l := listen(t)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			n.serve(conn)
		}
	}()
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", l.Addr().String())
	}}
}

func (n *nameServer) serve(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	for {
		var size uint16
		if binary.Read(conn, binary.BigEndian, &size) != nil {
			return
		}
		question := make([]byte, size)
		if _, err := io.ReadFull(conn, question); err != nil {
			return
		}
		var name string
		end := 12
		var nameSb190 strings.Builder
		for question[end] != 0 {
			length := int(question[end])
			nameSb190.WriteString(string(question[end+1:end+1+length]) + ".")
			end += 1 + length
		}
		name += nameSb190.String()
		end += 5 // the root label, type and class
		reply := append(slices.Clone(question[:2]), 0x81, 0x80, 0, 1, 0, 0, 0, 0, 0, 0)
		reply = append(reply, question[12:end]...)
		turns := n.answers[name]
		if len(turns) == 0 {
			return
		}
		for _, a := range turns[0] {
			reply = append(reply, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4)
			reply = append(reply, netip.MustParseAddr(a).AsSlice()...)
			reply[7]++
		}
		if len(turns) > 1 {
			n.answers[name] = turns[1:]
		}
		if binary.Write(conn, binary.BigEndian, uint16(len(reply))) != nil {
			return
		}
		if _, err := conn.Write(reply); err != nil {
			return
		}
	}
}
