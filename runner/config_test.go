package runner

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/org-runink/runbus/runner/tunnel"
	"github.com/org-runink/runbus/schemas"
)

func env(pairs map[string]string) func(string) string {
	return func(name string) string { return pairs[name] }
}

// Every variable that a runner reads, by its field.
func TestConfigFromEnvReadsEveryVariable(t *testing.T) {
	got, err := ConfigFromEnv(env(map[string]string{
		"RUNNER_ENROLL_ADDR": " a:1, wss://b ,,c:2", "RUNNER_ENROLL_TOKEN": "token", "RUNNER_ENROLL_TLS": "true",
		"RUNNER_ENROLL_CA": "/ca.pem", "RUNNER_ID": "edge", "RUNNER_NAME": "Edge", "RUNNER_VERSION": "v9",
		"RUNNER_FILE_ROOTS": "/a" + string(os.PathListSeparator) + string(os.PathListSeparator) + "/b", "RUNNER_CONCURRENCY": "7",
		"RUNNER_DRAIN_GRACE": "90s", "CORE_RUNNER_STATE_DIR": "/state",
		"HTTPS_PROXY": "proxy:3128", "no_proxy": ".internal",
	}))
	must(t, err)
	want := Config{
		Addrs: []string{"a:1", "wss://b", "c:2"}, Token: "token", TLS: true, CA: "/ca.pem", ID: "edge", Name: "Edge", Version: "v9",
		FileRoots: []string{"/a", "/b"}, Concurrency: 7, DrainGrace: 90 * time.Second, StateDir: "/state",
		Proxy: tunnel.Settings{Proxy: "proxy:3128", ProxyFrom: "HTTPS_PROXY", Except: ".internal", ExceptFrom: "no_proxy"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if got, err := ConfigFromEnv(env(nil)); err != nil || !reflect.DeepEqual(got, Config{TLS: true}) {
		t.Errorf("an empty environment gives %+v, %v", got, err)
	}
	if got, _ := ConfigFromEnv(env(map[string]string{"RUNNER_ENROLL_TLS": "0", "RUNNER_DRAIN_GRACE": "0s"})); got.TLS || got.DrainGrace != 1 {
		t.Errorf("TLS %v, grace %v", got.TLS, got.DrainGrace)
	}
}

func TestConfigFromEnvRefusesWhatItCannotRead(t *testing.T) {
	for name, values := range map[string][]string{
		"RUNNER_ENROLL_TLS":  {"yes please", "2", " "},
		"RUNNER_CONCURRENCY": {"0", "-1", "four", "4.5", "10001", "99999999999999999999"},
		"RUNNER_DRAIN_GRACE": {"10", "-1s", "soon"},
	} {
		for _, v := range values {
			_, err := ConfigFromEnv(env(map[string]string{name: v}))
			wantExit(t, err, ExitConfig, name+" is ")
		}
	}
}

// What New refuses before anything is dialled: status 2, with a text that names the variable and shows no secret.
func TestNewRefusesABadConfiguration(t *testing.T) {
	token, _, err := schemas.NewServiceToken("acme")
	must(t, err)
	file := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(file, []byte("not a certificate"), 0o600))
	for name, c := range map[string]struct {
		change func(*Config)
		text   string
	}{
		"no address":         {func(c *Config) { c.Addrs = nil }, "set RUNNER_ENROLL_ADDR"},
		"no token":           {func(c *Config) { c.Token = "" }, schemas.ErrTokenMissing().Message},
		"not a token":        {func(c *Config) { c.Token = "hunter2" }, "RUNNER_ENROLL_TOKEN: this is not a service-account token"},
		"damaged seed":       {func(c *Config) { c.Token = token[:len(token)-1] }, "RUNNER_ENROLL_TOKEN: the seed"},
		"damaged session":    {func(c *Config) { c.Token = "rst1.x" }, "RUNNER_ENROLL_TOKEN: this is not a session token"},
		"long id":            {func(c *Config) { c.ID = strings.Repeat("x", 65) }, "RUNNER_ID: the runner id has 65 characters"},
		"wildcard id":        {func(c *Config) { c.ID = "a*" }, "RUNNER_ID: "},
		"lifeline and id":    {func(c *Config) { c.Lifeline = 9 }, "RUNNER_LIFELINE is set"},
		"lifeline of nobody": {func(c *Config) { *c = Config{Lifeline: 1 << 20, StateDir: c.StateDir} }, "RUNNER_LIFELINE: "},
		"reserved id":        {func(c *Config) { c.ID = "console" }, `RUNNER_ID: "console" is reserved`},
		"long name":          {func(c *Config) { c.Name = strings.Repeat("x", 129) }, "RUNNER_NAME has 129 bytes"},
		"name with a bell":   {func(c *Config) { c.Name = "a\a" }, "RUNNER_NAME is not plain text"},
		"long version":       {func(c *Config) { c.Version = strings.Repeat("x", 65) }, "RUNNER_VERSION has 65 bytes"},
		"no CA file":         {func(c *Config) { c.CA = file + ".none" }, "RUNNER_ENROLL_CA: "},
		"CA without PEM":     {func(c *Config) { c.CA = file }, "holds no PEM certificate"},
		"no such root":       {func(c *Config) { c.FileRoots = []string{file + ".none"} }, "RUNNER_FILE_ROOTS: "},
		"state is a file":    {func(c *Config) { c.ID, c.StateDir = "", file }, "CORE_RUNNER_STATE_DIR"},
		"state can't be":     {func(c *Config) { c.ID, c.StateDir = "", filepath.Join(file, "x") }, "CORE_RUNNER_STATE_DIR"},
		"token as address":   {func(c *Config) { c.Addrs = []string{token} }, "RUNNER_ENROLL_ADDR has a user or a token in it"},
		"token in the URL":   {func(c *Config) { c.Addrs = []string{"tls://x:" + token + "@h:1"} }, "RUNNER_ENROLL_ADDR has a user or a token in it"},
		"second address bad": {func(c *Config) { c.Addrs = []string{"h:1", "http://h"} }, `unknown scheme "http"`},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := Config{Addrs: []string{"127.0.0.1:1"}, Token: token, ID: "edge", TLS: true}
			c.change(&cfg)
			_, err := New(cfg)
			wantExit(t, err, ExitConfig, c.text)
			if err != nil && (strings.Contains(err.Error(), token[len(token)-20:]) || strings.Contains(err.Error(), "hunter2")) {
				t.Errorf("a secret is in the text: %v", err)
			}
		})
	}
}

func TestServerURL(t *testing.T) {
	for _, c := range []struct {
		addr string
		tls  bool
		want string // or, with a blank in it, a part of the error
	}{
		{"host:4222", true, "tls://host:4222"},
		{"host:4222", false, "nats://host:4222"},
		{"host", true, "tls://host:4222"},
		{"host:", true, "tls://host:4222"},
		{"10.0.0.7:1", true, "tls://10.0.0.7:1"},
		{"[::1]:4223", true, "tls://[::1]:4223"},
		{"[::1]", true, "tls://[::1]:4222"},
		{"tls://host:1", true, "tls://host:1"},
		{"nats://host:1", true, "tls://host:1"},
		{"nats://host:1/", false, "nats://host:1"},
		{"wss://host", true, "wss://host:443"},
		{"wss://[fd00::1]", true, "wss://[fd00::1]:443"},
		{"wss://host:8443/bus", true, "wss://host:8443/bus"},
		{"ws://host:80", false, "ws://host:80"},
		{"tls://host:1", false, "RUNNER_ENROLL_TLS says false"},
		{"wss://host:1", false, "RUNNER_ENROLL_TLS says false"},
		{"ws://host:1", true, "which is plaintext"},
		{"http://host:1", true, `unknown scheme "http"`},
		{"::1", true, "is not host:port"},
		{"::1:4222", true, "is not host:port"},
		{"tls://", true, "is not host:port"},
		{":4222", true, "is not host:port"},
		{"host:0", true, "is not 1-65535"},
		{"host:65536", true, "is not 1-65535"},
		{"host:port", true, "is not host:port"},
		{"host:1/x", true, "more than a host"},
		{"wss://host/x?a=b", true, "more than a host"},
		{"tls://host:1#x", true, "more than a host"},
		{"tls://user:secret@host:1", true, "has a user or a token in it"},
		{"tls://user:%zz@host:1", true, "has a user or a token in it"},
		{"rsk1.acme.SUAAA:1", true, "has a user or a token in it"},
	} {
		got, err := (&Config{TLS: c.tls}).serverURL(c.addr)
		if strings.Contains(c.want, " ") {
			wantExit(t, err, ExitConfig, c.want)
			if err != nil && strings.Contains(err.Error(), "secret") {
				t.Errorf("%s: the password is in the text: %v", c.addr, err)
			}
		} else if err != nil || got != c.want {
			t.Errorf("%s (TLS %v): %q, %v; want %q", c.addr, c.tls, got, err, c.want)
		}
	}
}

func FuzzServerURL(f *testing.F) {
	for _, addr := range []string{"host:4222", "[::1]:1", "wss://h/p", "tls://u:p@h", "::", "h:99999999999999999999"} {
		f.Add(addr, true)
	}
	f.Fuzz(func(t *testing.T, addr string, tls bool) {
		c := Config{TLS: tls}
		got, err := c.serverURL(addr)
		if err != nil {
			if ExitCode(err) != ExitConfig {
				t.Fatalf("%q: %v", addr, err)
			}
			return
		}
		if plain := strings.HasPrefix(got, "nats://") || strings.HasPrefix(got, "ws://"); plain == tls {
			t.Fatalf("%q with TLS %v becomes %q", addr, tls, got)
		}
		if again, err := c.serverURL(got); err != nil || again != got {
			t.Fatalf("%q becomes %q, and that %q, %v", addr, got, again, err)
		}
	})
}

// A runner without RUNNER_ID keeps the one that was generated at its first start, also if several start at once.
func TestAGeneratedIDIsKept(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "state")
	ids := make([]string, 16)
	var starts sync.WaitGroup
	for i := range ids {
		starts.Go(func() {
			id, err := keptID(dir)
			if err != nil {
				t.Error(err)
			}
			ids[i] = id
		})
	}
	starts.Wait()
	for _, id := range ids {
		if id != ids[0] || schemas.ValidRunnerID(id) != nil {
			t.Fatalf("ids %q", ids)
		}
	}
	token, _, err := schemas.NewServiceToken("acme")
	must(t, err)
	a, err := New(Config{Addrs: []string{"127.0.0.1:1"}, Token: token, StateDir: dir, TLS: true})
	must(t, err)
	if a.ID() != ids[0] {
		t.Errorf("the next start has %q, not %q", a.ID(), ids[0])
	}
	entries, err := os.ReadDir(dir)
	must(t, err)
	info, err := os.Stat(dir)
	must(t, err)
	if len(entries) != 1 || info.Mode().Perm() != 0o700 {
		t.Errorf("the state folder has mode %v and %v", info.Mode(), entries)
	}
	for _, damage := range []string{"", "\n", "a b\n", strings.Repeat("x", 65)} {
		must(t, os.WriteFile(filepath.Join(dir, "runner-id"), []byte(damage), 0o600))
		_, err := keptID(dir)
		wantExit(t, err, ExitConfig, "is damaged")
	}
}

func TestExitCode(t *testing.T) {
	if ExitCode(nil) != 0 || ExitCode(os.ErrClosed) != 1 || ExitCode(configError("x")) != 2 {
		t.Error("exit statuses")
	}
}
