package embedded

import (
	"errors"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/org-runink/runbus/schemas"
)

func testConfig(t testing.TB) Config {
	t.Helper()
	dir := t.TempDir()
	cert, key, _, err := EnsureCertificate(dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	return Config{Name: "test", StoreDir: filepath.Join(dir, "store"), Listen: "127.0.0.1:0", WebSocket: "127.0.0.1:0", CertFile: cert, KeyFile: key, Keys: loadKeys(t)}
}

func parsed(t testing.TB, text string) *server.Options {
	t.Helper()
	o := &server.Options{}
	if err := o.ProcessConfigString(text); err != nil {
		t.Fatalf("the stock parser: %v\n%s", err, text)
	}
	return o
}

// The text is one that the stock parser reads, without a warning, and says what DESIGN asks for.
func TestConfigTextParses(t *testing.T) {
	c := testConfig(t)
	text, err := ConfigText(c)
	if err != nil {
		t.Fatal(err)
	}
	o := parsed(t, text)
	for what, ok := range map[string]bool{
		"name": o.ServerName == "test", "host": o.Host == "127.0.0.1", "a free port": o.Port == server.RANDOM_PORT,
		"store": o.StoreDir == c.StoreDir, "JetStream": o.JetStream, "sync always": o.SyncAlways,
		"memory": o.JetStreamMaxMemory == 256<<20, "file": o.JetStreamMaxStore == 32<<30,
		"payload": o.MaxPayload == 1<<20, "control line": o.MaxControlLine == 4<<10, "subscriptions": o.MaxSubs == 1000,
		"pending": o.MaxPending == 64<<20, "write deadline": o.WriteDeadline == 10*time.Second,
		"pings": o.PingInterval == 6*time.Second && o.MaxPingsOut == 2, "auth timeout": o.AuthTimeout == 1.8,
		"TLS":           o.TLSConfig != nil && o.TLSConfig.MinVersion == 0x0304 && !o.TLSHandshakeFirst && !o.AllowNonTLS,
		"WebSocket":     o.Websocket.Port == -1 && o.Websocket.Host == "127.0.0.1" && o.Websocket.TLSConfig != nil && o.Websocket.TLSConfig.MinVersion == 0x0304 && !o.Websocket.NoTLS,
		"no monitoring": o.HTTPPort == 0 && o.HTTPSPort == 0 && o.ProfPort == 0, "no trace": !o.Trace && !o.Debug,
		"no anonymous user": o.NoAuthUser == "", "system account": o.SystemAccount == "SYS",
		"callout": o.AuthCallout.Account == "AUTH" && o.AuthCallout.Issuer == c.Keys.public(keyIssuer) && o.AuthCallout.XKey == c.Keys.public(keyXKey),
	} {
		if !ok {
			t.Errorf("%s is not as it should be", what)
		}
	}
	var accounts, users []string
	for _, a := range o.Accounts {
		accounts = append(accounts, a.Name)
	}
	for _, u := range o.Nkeys {
		users = append(users, u.Nkey)
	}
	slices.Sort(accounts)
	slices.Sort(users)
	if want := []string{"AUTH", "JAIL", "OPS", "RUN", "SEC", "SYS"}; !slices.Equal(accounts, want) {
		t.Errorf("accounts %v, want %v", accounts, want)
	}
	var want []string
	for _, u := range Users() {
		want = append(want, c.Keys.Public(u))
	}
	slices.Sort(want)
	slices.Sort(o.AuthCallout.AuthUsers)
	if !slices.Equal(users, want) || !slices.Equal(o.AuthCallout.AuthUsers, want) {
		t.Errorf("users %v, let in without the callout %v, want %v", users, o.AuthCallout.AuthUsers, want)
	}
	if len(o.Users) != 0 {
		t.Errorf("users with passwords: %v", o.Users)
	}
}

// The text may be shown: it has public keys only.
func TestConfigTextHasNoSeed(t *testing.T) {
	c := testConfig(t)
	text, err := ConfigText(c)
	if err != nil {
		t.Fatal(err)
	}
	if found := regexp.MustCompile(`\bS[UAXNOC][A-Z2-7]{20,}`).FindString(text); found != "" {
		t.Errorf("a seed in the text: %s…", found[:4])
	}
	for name, pair := range c.Keys.pairs {
		seed, err := pair.Seed()
		if err != nil || strings.Contains(text, string(seed)) {
			t.Errorf("the seed of %s is in the text (%v)", name, err)
		}
	}
	if len(regexp.MustCompile(`"U[A-Z2-7]{55}"`).FindAllString(text, -1)) != 2*len(Users()) {
		t.Error("not every user stands once as a user and once in auth_users")
	}
}

func TestConfigTextPlaintext(t *testing.T) {
	c := testConfig(t)
	c.Plaintext, c.Name = true, ""
	text, err := ConfigText(c)
	if err != nil {
		t.Fatal(err)
	}
	if o := parsed(t, text); o.TLSConfig != nil || !o.Websocket.NoTLS || o.Websocket.TLSConfig != nil || o.ServerName != "runbus" {
		t.Errorf("TLS %v, no_tls %v, name %q", o.TLSConfig != nil, o.Websocket.NoTLS, o.ServerName)
	}
	c.WebSocket = ""
	if text, err = ConfigText(c); err != nil {
		t.Fatal(err)
	}
	if o := parsed(t, text); o.Websocket.Port != 0 {
		t.Errorf("a WebSocket listener on port %d", o.Websocket.Port)
	}
}

func TestConfigIsRefused(t *testing.T) {
	good := testConfig(t)
	for want, change := range map[string]func(c *Config){
		"keys are missing":                    func(c *Config) { c.Keys = nil },
		"data folder is missing":              func(c *Config) { c.StoreDir = "" },
		"data folder \"a\\nb\" has a control": func(c *Config) { c.StoreDir = "a\nb" },
		"certificate file \"\\x00\" has a":    func(c *Config) { c.CertFile = "\x00" },
		"server name \"a b\" has a space":     func(c *Config) { c.Name = "a b" },
		`"" is not host:port`:                 func(c *Config) { c.Listen = "" },
		`"127.0.0.1" is not host:port`:        func(c *Config) { c.Listen = "127.0.0.1" },
		`"127.0.0.1:x" has no port`:           func(c *Config) { c.Listen = "127.0.0.1:x" },
		`"127.0.0.1:65536" has no port`:       func(c *Config) { c.WebSocket = "127.0.0.1:65536" },
		`"127.0.0.1:-1" has no port`:          func(c *Config) { c.Listen = "127.0.0.1:-1" },
		"has no valid host":                   func(c *Config) { c.Listen = "a\" b:1" },
		"the server has no certificate":       func(c *Config) { c.CertFile = "" },
		"is not on loopback":                  func(c *Config) { c.Plaintext, c.WebSocket = true, "0.0.0.0:0" },
	} {
		c := good
		change(&c)
		_, err := ConfigText(c)
		if !errors.Is(err, &schemas.Error{Code: schemas.CodeInvalid}) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want CodeInvalid with %q", err, want)
		}
		if _, err := Start(c); err == nil {
			t.Errorf("%q: started", want)
		}
	}
}

// FuzzConfigText: a name, a folder and addresses from outside either are refused or come back from the stock parser as
// they were: nothing else of the configuration can be written through them.
func FuzzConfigText(f *testing.F) {
	keys := loadKeys(f)
	for _, s := range []string{"/var/lib/runbus", `C:\x "y"`, "$HOME/ü", "a # b // c", "}\nhttp: 1", `\x41`, "include 'x'", `"`} {
		f.Add(s, s, "127.0.0.1:4222")
	}
	f.Add("n", "s", "[::1]:0")
	f.Add("n", "s", "\"\nhttp: :1")
	f.Fuzz(func(t *testing.T, name, store, listen string) {
		text, err := ConfigText(Config{Name: name, StoreDir: store, Listen: listen, Plaintext: true, Keys: keys})
		if err != nil {
			return
		}
		o := parsed(t, text)
		if name != "" && o.ServerName != name || o.StoreDir != store || o.HTTPPort != 0 || len(o.Accounts) != 6 {
			t.Errorf("name %q became %q, store %q became %q, http %d, %d accounts", name, o.ServerName, store, o.StoreDir, o.HTTPPort, len(o.Accounts))
		}
	})
}
