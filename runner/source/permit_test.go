package source

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

// deny is a Permit that refuses what is in a prefix.
func deny(prefix string) Permit {
	p := netip.MustParsePrefix(prefix)
	return func(host string, ip netip.Addr, port uint16) error {
		if p.Contains(ip) {
			return schemas.Errorf(schemas.CodeForbiddenHop, "denied %s %s %d", host, ip, port)
		}
		return nil
	}
}

// TestTheAddressThatIsDialledIsDecidedOver has names that resolve to addresses a rule denies, all of them or some.
func TestTheAddressThatIsDialledIsDecidedOver(t *testing.T) {
	target := listen(t)
	_, port, err := net.SplitHostPort(target.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	names := &nameServer{answers: map[string][][]string{
		"denied.test.": {{"127.0.0.2", "127.0.0.3"}},
		"some.test.":   {{"127.0.0.2", "127.0.0.1"}},
		"flips.test.":  {{"127.0.0.1"}, {"127.0.0.2"}},
		"meta.test.":   {{"127.0.0.1", "169.254.169.254"}},
	}}
	dial := GuardedDialBy(&net.Dialer{Resolver: names.start(t)}, deny("127.0.0.2/31"))
	want := "denied denied.test. 127.0.0.2 " + port
	if _, err := dial(t.Context(), "tcp4", net.JoinHostPort("denied.test.", port)); schemas.CodeOf(err) != schemas.CodeForbiddenHop || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
	for _, host := range []string{"some.test.", "flips.test."} { // what is allowed is dialled, and nothing else
		conn, err := dial(t.Context(), "tcp4", net.JoinHostPort(host, port))
		if err != nil {
			t.Fatal(err)
		}
		if got := conn.RemoteAddr().String(); got != target.Addr().String() {
			t.Errorf("%s: dialled %s", host, got)
		}
		_ = conn.Close()
	}
	if _, err := dial(t.Context(), "tcp4", net.JoinHostPort("flips.test.", port)); schemas.CodeOf(err) != schemas.CodeForbiddenHop {
		t.Errorf("the second answer: %v", err)
	}
	for _, host := range []string{"::ffff:127.0.0.2", "127.0.0.2"} { // mapped is the same address
		if _, err := dial(t.Context(), "tcp", net.JoinHostPort(host, port)); schemas.CodeOf(err) != schemas.CodeForbiddenHop || !strings.Contains(err.Error(), " 127.0.0.2 ") {
			t.Errorf("%s: %v", host, err)
		}
	}
}

// TestNoPermitAllowsMetadata has one that allows everything.
func TestNoPermitAllowsMetadata(t *testing.T) {
	asked := 0
	all := func(string, netip.Addr, uint16) error { asked++; return nil }
	names := &nameServer{answers: map[string][][]string{"mixed.test.": {{"127.0.0.1", "169.254.169.254"}}}}
	dial := GuardedDialBy(&net.Dialer{Resolver: names.start(t)}, all)
	for _, host := range []string{"169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "metadata.google.internal", "mixed.test."} {
		if _, err := dial(t.Context(), "tcp", net.JoinHostPort(host, "80")); schemas.CodeOf(err) != schemas.CodeForbiddenHop {
			t.Errorf("%s: %v", host, err)
		}
	}
	if asked != 0 {
		t.Errorf("asked %d times", asked)
	}
}

func TestEveryReadOfAFileIsDecidedOver(t *testing.T) {
	dir := t.TempDir()
	actual, err := filepath.EvalSymlinks(dir)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"open.csv": "a", "secret/x.csv": "b"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("secret/x.csv", filepath.Join(dir, "link.csv")); err != nil {
		t.Fatal(err)
	}
	base, err := OpenRoots(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer base.Close() //nolint:errcheck // of a test
	no := errors.New("no")
	roots := base.By(func(asked, resolved string) error {
		if !strings.HasPrefix(asked, dir) || !strings.HasPrefix(resolved, actual) {
			t.Errorf("asked about %q, %q", asked, resolved)
		}
		if strings.Contains(resolved, "secret") {
			return no
		}
		return nil
	})
	for name, want := range map[string]error{"open.csv": nil, dir + "/open.csv": nil, "secret/x.csv": no, "link.csv": no} {
		f, err := roots.Open(name)
		if !errors.Is(err, want) || want == nil && err != nil {
			t.Errorf("open %s: %v", name, err)
		}
		if err == nil {
			_ = f.Close()
		}
		if _, _, err := roots.Resolve(name); !errors.Is(err, want) || want == nil && err != nil {
			t.Errorf("resolve %s: %v", name, err)
		}
		if _, err := roots.Glob(name); !errors.Is(err, want) || want == nil && err != nil {
			t.Errorf("glob %s: %v", name, err)
		}
	}
	for pattern, want := range map[string]error{"o*.csv": nil, "l*.csv": no, "*.csv": no, "*/x.csv": no} {
		if _, err := roots.Glob(pattern); !errors.Is(err, want) || want == nil && err != nil {
			t.Errorf("glob %s: %v", pattern, err)
		}
	}
	if f, err := base.Open("link.csv"); err != nil { // the roots themselves stay as they were
		t.Error(err)
	} else {
		_ = f.Close()
	}
	if (*Roots)(nil).By(nil) != nil {
		t.Error("no roots became some")
	}
}
