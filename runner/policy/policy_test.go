package policy

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"
)

func TestDial(t *testing.T) {
	p := parse(t, `
version: 1
deny:
  - {name: hr, cidrs: [10.9.0.0/16]}
  - {name: evil, hosts: [evil.example, "*.evil.example"]}
  - {name: no-http-loopback, kinds: [http], cidrs: [127.0.0.0/8, "::1"]}
allow:
  - {name: db, kinds: [postgres], hosts: [db.internal, "*.wh.example"], cidrs: [10.0.0.0/8], ports: [5432, 6000-6010]}
  - {name: web, kinds: [http], ports: [443]}
  - {name: v6, kinds: [postgres], cidrs: ["2001:db8::/32"]}
  - {name: files, paths: [/srv]}
`)
	for _, c := range []struct {
		kind, host, ip string
		port           uint16
		rule           string
		allowed        bool
	}{
		{"postgres", "db.internal", "10.1.2.3", 5432, "db", true},
		{"postgres", "DB.Internal.", "10.1.2.3", 6010, "db", true},
		{"postgres", "a.b.wh.example", "10.1.2.3", 6000, "db", true},
		{"postgres", "wh.example", "10.1.2.3", 6000, "default deny", false},
		{"postgres", "xwh.example", "10.1.2.3", 6000, "default deny", false},
		{"postgres", "db.internal", "10.1.2.3", 6011, "default deny", false},
		{"postgres", "db.internal", "11.1.2.3", 5432, "default deny", false},
		{"postgres", "db.internal", "10.9.2.3", 5432, "hr", false}, // deny wins
		{"postgres", "db.internal", "::ffff:10.1.2.3", 5432, "db", true},
		{"postgres", "db.internal", "::ffff:10.9.2.3", 5432, "hr", false},
		{"postgres", "db.internal", "64:ff9b::10.9.2.3", 5432, "hr", false},
		{"postgres", "db.internal", "2002:0a09:0203::1", 5432, "hr", false},
		{"postgres", "db.internal", "64:ff9b::10.1.2.3", 5432, "default deny", false}, // allowed is the address itself alone
		{"postgres", "10.9.2.3", "10.9.2.3", 5432, "hr", false},
		{"postgres", "x", "2001:db8::9", 1, "v6", true},
		{"postgres", "x", "2001:db8::9%eth0", 1, "v6", true},
		{"http", "example.com", "1.2.3.4", 443, "web", true},
		{"http", "example.com", "1.2.3.4", 80, "default deny", false},
		{"http", "evil.example", "1.2.3.4", 443, "evil", false},
		{"http", "x.EVIL.example.", "1.2.3.4", 443, "evil", false},
		{"http", "localhost", "127.0.0.1", 443, "no-http-loopback", false},
		{"http", "localhost", "::1", 443, "no-http-loopback", false},
		{"http", "localhost", "::ffff:127.0.0.1", 443, "no-http-loopback", false},
		{"sqlite", "x", "1.2.3.4", 443, "default deny", false}, // a rule about paths allows no dial
	} {
		if d := p.Dial(c.kind, c.host, netip.MustParseAddr(c.ip), c.port); d.Rule != c.rule || d.Allowed != c.allowed {
			t.Errorf("%s %s %s:%d: %+v, want %s", c.kind, c.host, c.ip, c.port, d, c.rule)
		}
	}
	var nobody *Policy
	if d := nobody.Dial("http", "x", netip.MustParseAddr("1.2.3.4"), 1); !d.Allowed || d.Rule != "no policy" {
		t.Errorf("without a policy: %+v", d)
	}
}

func TestTheFirstAllowRuleThatMatchesCounts(t *testing.T) {
	p := parse(t, "version: 1\nallow:\n  - {name: a, ports: [1]}\n  - {name: b, ports: [1-2]}\n  - {kinds: [http]}\n")
	for port, rule := range map[uint16]string{1: "a", 2: "b", 3: "allow #3"} {
		if d := p.Dial("http", "x", netip.MustParseAddr("1.2.3.4"), port); d.Rule != rule || !d.Allowed {
			t.Errorf("%d: %+v", port, d)
		}
	}
}

func TestKind(t *testing.T) {
	p := parse(t, "version: 1\ndeny:\n  - {name: no-sqlite, kinds: [sqlite]}\nallow:\n  - {name: db, kinds: [postgres], ports: [5432]}\n")
	for kind, want := range map[string]Decision{
		"sqlite": {Rule: "no-sqlite"}, "http": {Rule: "default deny"}, "postgres": {Allowed: true, Rule: "db"},
	} {
		if d := p.Kind(kind); d.Rule != want.Rule || d.Allowed != want.Allowed {
			t.Errorf("%s: %+v", kind, d)
		}
	}
	p = parse(t, "version: 1\ndefault: allow\ndeny:\n  - {hosts: [x]}\n")
	if d := p.Kind("http"); !d.Allowed || d.Rule != "default allow" {
		t.Errorf("%+v", d)
	}
}

func TestPath(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"real/private", "other"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{"open": "real", "real/out": "../other", "real/in": "private"} {
		if err := os.Symlink(to, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	// The allowed folder is named by a symbolic link.
	p := parse(t, "version: 1\ndeny:\n  - {name: private, paths: ["+dir+"/real/private]}\nallow:\n  - {name: open, kinds: [file], paths: ["+dir+"/open]}\n  - {ports: [1]}\n")
	for name, rule := range map[string]string{
		"open/a": "open", "real/a": "open", "open": "open", "openx": "default deny", "other/a": "default deny",
		"open/private/a": "private", "real/in/a": "private", "open/out/a": "default deny",
	} {
		asked := filepath.Join(dir, name)
		if d := p.Path("file", asked, Resolve(asked)); d.Rule != rule || d.Allowed != (rule == "open") {
			t.Errorf("%s: %+v, want %s", name, d, rule)
		}
	}
	if d := p.Path("sqlite", dir+"/real/a", dir+"/real/a"); d.Allowed {
		t.Errorf("another kind: %+v", d)
	}
}
