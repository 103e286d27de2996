package runner

import (
	"bufio"
	"bytes"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/runner/tunnel"
	"github.com/org-runink/runbus/runner/tunnel/tunneltest"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// examine makes a diagnosis of a runner of this control plane. No check may show a secret.
func (c *controlPlane) examine(t *testing.T, change func(*Config, *DoctorOptions)) Diagnosis {
	t.Helper()
	cfg := Config{Addrs: []string{c.URL()}, Token: c.token, ID: edge.Runner, TLS: true, CA: c.CAFile, StateDir: t.TempDir()}
	must(t, os.Chmod(cfg.StateDir, 0o700))
	o := DoctorOptions{Patience: patience}
	if change != nil {
		change(&cfg, &o)
	}
	began := []string{}
	o.Begin = func(name, address string) { began = append(began, name+" "+address) }
	d := Diagnose(t.Context(), cfg, o)
	var made []string
	for _, check := range d.Checks {
		made = append(made, check.Name+" "+check.Address)
		if check.Saw == "" || (check.Verdict == CheckFail || check.Verdict == CheckWarn) != (check.Todo != "") {
			t.Errorf("%+v: a check says what it saw, and a bad one what to do", check)
		}
	}
	if !slices.Equal(began, made) {
		t.Errorf("began %v, made %v", began, made)
	}
	text, err := json.Marshal(d)
	must(t, err)
	for _, secret := range []string{cfg.Token, "hunter2", cfg.Token[max(strings.LastIndexByte(cfg.Token, '.'), 0):]} {
		if secret != "" && bytes.Contains(text, []byte(secret)) {
			t.Errorf("a secret is in %s", text)
		}
	}
	return d
}

// only finds the one check of that name.
func (d Diagnosis) only(t *testing.T, name string) Check {
	t.Helper()
	var found []Check
	for _, c := range d.Checks {
		if c.Name == name {
			found = append(found, c)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d checks %q in %+v", len(found), name, d.Checks)
	}
	return found[0]
}

// well reports whether all is, but for a machine that may be too busy to answer pings at once.
func (d Diagnosis) well() bool {
	want := CheckOK
	for _, c := range d.Checks {
		switch {
		case c.Name == "rtt" && c.Verdict == CheckWarn:
			want = CheckWarn
		case c.Verdict == CheckWarn || c.Verdict == CheckFail:
			return false
		}
	}
	return d.Verdict == want
}

// Whatever way leads to a control plane, all is well, and nothing but a probe was said there.
func TestDoctorFindsNothing(t *testing.T) {
	cp := newControlPlane(t, named(t))
	proxy := tunneltest.Start(t, &tunneltest.Proxy{Knows: map[string]string{name + ":443": cp.WebSocketAddr()}, User: "me", Password: "hunter2"}, nil)
	for what, c := range map[string]struct {
		change func(*Config, *DoctorOptions)
		saw    map[string]string
	}{
		"TLS": {nil, map[string]string{
			"dns": "no name to resolve", "proxy": "not used: HTTPS_PROXY is not set", "tls": "TLS 1.3", "token": `tenant "acme"`,
			"clock": "this host's clock is", "permissions": "another runner's are not", "payload": "1048576", "rtt": "of 10 pings",
			"state": "can be written", "journal": "no records yet", "policy": "none", "files": "none", "configuration": `runner id "edge.1" (RUNNER_ID)`,
		}},
		"name": {func(c *Config, _ *DoctorOptions) {
			_, port, _ := net.SplitHostPort(cp.Addr())
			c.Addrs = []string{"localhost:" + port}
		}, map[string]string{"dns": "IPv4 127.0.0.1"}},
		"WebSocket": {func(c *Config, _ *DoctorOptions) { c.Addrs = []string{cp.WebSocketURL()} }, map[string]string{"tls": "issued by"}},
		"proxy": {func(c *Config, _ *DoctorOptions) {
			c.Addrs, c.Proxy = []string{"wss://" + name}, tunnel.Settings{Proxy: "http://me:hunter2@" + proxy.Addr(), ProxyFrom: "https_proxy"}
		}, map[string]string{
			"dns": "the proxy; it resolves the control plane's name itself", "tls": name,
			"proxy": "http://" + proxy.Addr() + " (set by https_proxy) gives a tunnel to " + name + ":443",
		}},
		"files": {func(c *Config, _ *DoctorOptions) { c.FileRoots = []string{t.TempDir()} }, map[string]string{"files": "can be read"}},
		"id kept": {func(c *Config, _ *DoctorOptions) {
			c.ID = ""
			must(t, os.WriteFile(filepath.Join(c.StateDir, "runner-id"), []byte(edge.Runner+"\n"), 0o600))
		}, map[string]string{"configuration": `runner id "edge.1" (kept in the state folder)`}},
	} {
		t.Run(what, func(t *testing.T) {
			d := cp.examine(t, c.change)
			if !d.well() {
				t.Errorf("%+v", d)
			}
			for name, saw := range c.saw {
				if got := d.only(t, name); !strings.Contains(got.Saw, saw) {
					t.Errorf("%s saw %q, want %q", name, got.Saw, saw)
				}
			}
			h := receive(t, cp.hellos, "probe")
			if !h.GetProbe() || len(h.GetSealingKey()) != 0 {
				t.Errorf("a hello that is no probe: %v", h)
			}
			none(t, cp.beats, "heartbeat")
			none(t, cp.goodbyes, "goodbye")
		})
	}
}

// Each failure is found where it is, with what to do; what comes after it is not guessed at.
func TestDoctorFinds(t *testing.T) {
	cp, open := newControlPlane(t, named(t)), newControlPlane(t, plaintext)
	late := newControlPlane(t)
	late.ahead = time.Hour + 30*time.Second // a slow answer may add seconds, or take them off
	aged := newControlPlane(t)
	aged.ahead = 360 * 24 * time.Hour
	other := bustest.Start(t)
	nobody := bustest.Start(t)
	stranger, _, err := schemas.NewServiceToken(edge.Tenant)
	must(t, err)
	small := lines(t, open.Addr(), func(line []byte) []byte {
		return bytes.Replace(line, []byte(`"max_payload":1048576`), []byte(`"max_payload":65536`), 1)
	})
	lenient := lines(t, open.Addr(), func(line []byte) []byte {
		if bytes.HasPrefix(line, []byte("-ERR 'Permissions Violation")) {
			return nil
		}
		return line
	})
	mail := lines(t, "", func([]byte) []byte { return []byte("220 mail.example ESMTP\r\n") })
	at := func(addr string) func(*Config, *DoctorOptions) {
		return func(c *Config, _ *DoctorOptions) { c.Addrs = []string{addr} }
	}
	bare := func(addr string) func(*Config, *DoctorOptions) {
		return func(c *Config, _ *DoctorOptions) { c.Addrs, c.TLS, c.Token = []string{addr}, false, open.token }
	}
	hasty := map[string]bool{"black hole": true, "silent": true, "silent WebSocket": true} // of those nothing comes, for however long one waits
	token := func(token string) func(*Config, *DoctorOptions) {
		return func(c *Config, _ *DoctorOptions) { c.Token = token }
	}
	through := func(user string, p *tunneltest.Proxy) func(*Config, *DoctorOptions) {
		tunneltest.Start(t, p, nil)
		return func(c *Config, _ *DoctorOptions) {
			c.Addrs, c.Proxy = []string{name}, tunnel.Settings{Proxy: "http://" + user + p.Addr()}
		}
	}
	clock := func(by time.Duration) func(*Config, *DoctorOptions) {
		return func(_ *Config, o *DoctorOptions) { o.Now = func() time.Time { return time.Now().Add(by) } }
	}
	state := func(do func(dir string, c *Config)) func(*Config, *DoctorOptions) {
		return func(c *Config, _ *DoctorOptions) { do(c.StateDir, c) }
	}
	write := func(file, text string) string {
		must(t, os.MkdirAll(filepath.Dir(file), 0o700))
		must(t, os.WriteFile(file, []byte(text), 0o600))
		return file
	}
	for what, c := range map[string]struct {
		change    func(*Config, *DoctorOptions)
		check     string
		verdict   Verdict
		saw, todo string
	}{
		"no address":        {func(c *Config, _ *DoctorOptions) { c.Addrs = nil }, "configuration", CheckFail, "set RUNNER_ENROLL_ADDR to its host:port", "mend"},
		"an id alone":       {func(c *Config, _ *DoctorOptions) { c.Addrs, c.Token = nil, "" }, "configuration", CheckFail, "or set RUNNER_ENROLL_ADDR", "mend"},
		"dials and listens": {func(c *Config, _ *DoctorOptions) { c.Listen = ":7443" }, "configuration", CheckFail, "RUNNER_ENROLL_ADDR and CORE_RUNNER_LISTEN", "mend"},
		"a ticket too":      {func(c *Config, _ *DoctorOptions) { c.Ticket = new(schemas.Ticket) }, "configuration", CheckFail, "RUNNER_ENROLL_ADDR and a ticket", "mend"},
		"a bad ticket too":  {func(_ *Config, o *DoctorOptions) { o.NoTicket = errors.New("no ticket") }, "configuration", CheckFail, "no ticket", "mend"},
		"a bad journal":     {func(c *Config, _ *DoctorOptions) { c.Journal = "maybe" }, "configuration", CheckFail, `RUNNER_JOURNAL is "maybe"`, "mend"},
		"a long name":       {func(c *Config, _ *DoctorOptions) { c.Name = strings.Repeat("x", 129) }, "configuration", CheckFail, "RUNNER_NAME has 129 bytes", "mend"},
		"a dialled id":      {func(c *Config, _ *DoctorOptions) { c.ID = schemas.NewRunnerID() }, "configuration", CheckFail, "RUNNER_ID: ", ""},
		"mixed addresses":   {func(c *Config, _ *DoctorOptions) { c.Addrs = []string{"a:1", "wss://b"} }, "configuration", CheckFail, "use one kind", "mend"},
		"bad address":       {at("http://a:1"), "configuration", CheckFail, `unknown scheme "http"`, "mend"},
		"no CA file":        {func(c *Config, _ *DoctorOptions) { c.CA = "/nowhere/ca.pem" }, "configuration", CheckFail, "RUNNER_ENROLL_CA", "mend"},
		"bad id":            {func(c *Config, _ *DoctorOptions) { c.ID = "a b" }, "configuration", CheckFail, "RUNNER_ID", "mend"},
		"the console's id":  {func(c *Config, _ *DoctorOptions) { c.ID = "console" }, "configuration", CheckFail, "reserved", "mend"},
		"kind of proxy":     {func(c *Config, _ *DoctorOptions) { c.Proxy.Proxy = "socks5://u:hunter2@p:1080" }, "configuration", CheckFail, "only http:// and https://", "mend"},
		"no DNS":            {at("nowhere.invalid:4222"), "dns", CheckFail, "does not resolve", "resolver"},
		"proxy not in DNS":  {func(c *Config, _ *DoctorOptions) { c.Addrs, c.Proxy.Proxy = []string{name}, "nowhere.invalid:3128" }, "dns", CheckFail, "(the proxy;", "resolver"},
		"wrong port":        {at("127.0.0.1:1"), "tcp", CheckFail, "connection refused", "is the port its NATS port"},
		"black hole":        {at(blackHole(t)), "tcp", CheckFail, "i/o timeout", "a firewall may drop"},
		"proxy is down":     {func(c *Config, _ *DoctorOptions) { c.Addrs, c.Proxy.Proxy = []string{name}, "127.0.0.1:1" }, "tcp", CheckFail, "connection refused", "is the proxy up"},
		"login at proxy":    {through("", &tunneltest.Proxy{User: "me", Password: "secret"}), "proxy", CheckFail, "asks for a user and password (407", "http://user:password@host:port"},
		"wrong login":       {through("me:hunter2@", &tunneltest.Proxy{User: "me", Password: "secret"}), "proxy", CheckFail, "refuses the user and password in HTTPS_PROXY (407", "check them"},
		"no CONNECT":        {through("", &tunneltest.Proxy{}), "proxy", CheckFail, "(403", "port 443 only"},
		"silent":            {at(silent(t)), "tls", CheckFail, "no greeting of a NATS server", "wss://"},
		"silent WebSocket":  {at("wss://" + silent(t)), "tls", CheckFail, "no handshake", "a firewall may drop"},
		"no NATS":           {at(mail), "tls", CheckFail, "does not speak NATS", "is it the control plane's NATS port"},
		"no TLS there":      {at(open.Addr()), "tls", CheckFail, "offers no TLS", "RUNNER_ENROLL_TLS=false would send in the clear"},
		"no TLS there, wss": {at("wss://" + open.WebSocketAddr()), "tls", CheckFail, "first record does not look like a TLS handshake", "speaks no TLS"},
		"TLS turned off":    {func(c *Config, _ *DoctorOptions) { c.TLS, c.Addrs = false, []string{cp.Addr()} }, "tls", CheckFail, "requires TLS", "remove that setting"},
		"in the clear":      {bare(open.Addr()), "tls", CheckWarn, "RUNNER_ENROLL_TLS=false", "use TLS"},
		"no CA":             {func(c *Config, _ *DoctorOptions) { c.CA = "" }, "tls", CheckFail, "signed by unknown authority", "set RUNNER_ENROLL_CA"},
		"another CA":        {func(c *Config, _ *DoctorOptions) { c.CA = other.CAFile }, "tls", CheckFail, "issued by", "something between (a proxy or firewall that inspects TLS)"},
		"certificate ended": {clock(3 * 365 * 24 * time.Hour), "tls", CheckFail, "expired", "this host's clock says"},
		"not yet begun":     {clock(-3 * 365 * 24 * time.Hour), "tls", CheckFail, "not yet valid", "this host's clock says"},
		"certificate ends": {func(c *Config, o *DoctorOptions) {
			c.Addrs, c.CA, c.Token, o.Now = []string{aged.Addr()}, aged.CAFile, aged.token, aged.now
		}, "tls", CheckWarn, "that is in", "renewed"},
		"no token":          {token(""), "token", CheckFail, "RUNNER_ENROLL_TOKEN is empty", "runink key create"},
		"no token, no DNS":  {func(c *Config, _ *DoctorOptions) { c.Token, c.Addrs = "", []string{"nowhere.invalid"} }, "token", CheckFail, "RUNNER_ENROLL_TOKEN is empty", "runink key create"},
		"form of the token": {token("rsk1.acme.SUhunter2"), "token", CheckFail, "damaged", "runink key create"},
		"unknown key":       {token(stranger), "token", CheckFail, "Authorization Violation", "was it minted there"},
		"another's id":      {func(c *Config, _ *DoctorOptions) { c.ID = "edge-2" }, "token", CheckFail, "Permissions Violation", "readyz"},
		"no control plane": {func(c *Config, _ *DoctorOptions) {
			c.Addrs, c.CA, c.Token = []string{nobody.Addr()}, nobody.CAFile, nobody.RunnerToken(t, edge)
		}, "token", CheckFail, "no control plane answers hellos", "is a control plane running"},
		"its clock": {func(c *Config, _ *DoctorOptions) {
			c.Addrs, c.CA, c.Token = []string{late.Addr()}, late.CAFile, late.token
		}, "clock", CheckFail, "1h0m…s behind", "NTP"},
		"this clock":        {clock(30 * time.Second), "clock", CheckWarn, "s ahead of", "NTP"},
		"permissions":       {bare(lenient), "permissions", CheckFail, "this runner may publish to another runner's subject", "not in force"},
		"payload":           {bare(small), "payload", CheckFail, "65536 bytes at most; results need 1048576", "max_payload: 1MB"},
		"state is a file":   {state(func(_ string, c *Config) { c.StateDir = write(filepath.Join(t.TempDir(), "file"), "") }), "state", CheckFail, "is not a folder", "CORE_RUNNER_STATE_DIR"},
		"no state folder":   {state(func(dir string, c *Config) { c.StateDir = filepath.Join(dir, "none") }), "state", CheckWarn, "is not there yet", "CORE_RUNNER_STATE_DIR"},
		"open state folder": {state(func(dir string, _ *Config) { must(t, os.Chmod(dir, 0o755)) }), "state", CheckWarn, "mode 0755", "chmod 700"},
		"damaged id":        {state(func(dir string, c *Config) { c.ID = ""; write(filepath.Join(dir, "runner-id"), "a b") }), "state", CheckFail, "damaged", "restore"},
		"damaged journal": {state(func(dir string, _ *Config) {
			write(filepath.Join(JournalDir(dir), "00000000000000000001.jsonl"), "{}\n")
		}), "journal", CheckFail, "", "journal verify"},
		"bad policy":         {state(func(dir string, c *Config) { c.Policy = write(filepath.Join(dir, "policy.yaml"), "rules: 7") }), "policy", CheckFail, "policy.yaml", "mend the file"},
		"file root missing":  {func(c *Config, _ *DoctorOptions) { c.FileRoots = []string{"/nowhere/at/all"} }, "files", CheckFail, "RUNNER_FILE_ROOTS", "take it off"},
		"file root relative": {func(c *Config, _ *DoctorOptions) { c.FileRoots = []string{"data"} }, "files", CheckFail, "not an absolute path", "from /"},
	} {
		t.Run(what, func(t *testing.T) {
			d := cp.examine(t, func(cfg *Config, o *DoctorOptions) {
				if c.change(cfg, o); hasty[what] {
					o.Patience = 2 * time.Second
				}
			})
			for within := 4 * time.Second; hasty[what] && d.only(t, c.check).Verdict == CheckSkip && within < patience; within *= 2 { // a check before it took too long
				d = cp.examine(t, func(cfg *Config, o *DoctorOptions) { c.change(cfg, o); o.Patience = within })
			}
			got := d.only(t, c.check)
			begins, ends, _ := strings.Cut(c.saw, "…")
			if got.Verdict != c.verdict || !strings.Contains(got.Saw, begins) || !strings.Contains(got.Saw, ends) || !strings.Contains(got.Todo, c.todo) {
				t.Errorf("%+v, want %s, %q, %q", got, c.verdict, c.saw, c.todo)
			}
			if c.verdict == CheckFail != (d.Verdict == CheckFail) || d.Verdict == CheckOK {
				t.Errorf("all in all %s", d.Verdict)
			}
			// A failure on the way leaves everything after it unseen, and nothing else fails with it.
			way := append([]string{"dns"}, linkChecks...)
			for _, other := range d.Checks {
				after := slices.Index(way, other.Name) > slices.Index(way, c.check) && slices.Contains(way[:5], c.check)
				seen := other.Verdict == CheckSkip || other.Name == "clock" || other.Name == "token" && strings.Contains(what, "no token")
				if c.verdict == CheckFail && after && !seen {
					t.Errorf("%+v after a failed %s", other, c.check)
				}
				if other.Verdict == CheckFail && other.Name != c.check && what != "no token, no DNS" && what != "damaged id" { // whose key may not take the doctor's
					t.Errorf("%s failed too: %+v", other.Name, other)
				}
			}
		})
	}
}

// What the control plane answers is shown in its own words.
func TestDoctorAndTheControlPlanesAnswer(t *testing.T) {
	cp := newControlPlane(t)
	old := schemas.Errorf(schemas.CodeInvalid, "the sealing key of the hello has 0 bytes: 1-4096 are allowed")
	for what, c := range map[string]struct {
		answer  *schemas.Error
		verdict Verdict
		saw     string
	}{
		"revoked": {schemas.ErrKeyRevoked("sa-edge"), CheckFail, `the service-account key "sa-edge" was revoked`},
		"expired": {schemas.ErrKeyExpired("sa-edge"), CheckFail, "has expired"},
		"bound":   {schemas.ErrRunnerBound(edge.Runner), CheckFail, "is bound to another"},
		"older":   {old, CheckWarn, "older than this doctor"},
		"no hint": {schemas.Errorf(schemas.CodeUnavailable, "not now"), CheckFail, "not now"},
	} {
		t.Run(what, func(t *testing.T) {
			cp.refuse(c.answer, true)
			d := cp.examine(t, nil)
			receive(t, cp.hellos, "probe")
			if got := d.only(t, "token"); got.Verdict != c.verdict || !strings.Contains(got.Saw, c.saw) {
				t.Errorf("%+v", got)
			}
			if got := d.only(t, "clock"); got.Verdict != CheckOK {
				t.Errorf("the answer tells the time: %+v", got)
			}
		})
	}
	t.Run("none", func(t *testing.T) {
		cp.answerWith(func(*runbusv1.RunnerHello) *runbusv1.EnrollmentAccepted { return nil })
		for within := 3 * time.Second; ; within *= 3 { // in which all before it must be done
			d := cp.examine(t, func(_ *Config, o *DoctorOptions) { o.Patience = within })
			got := d.only(t, "token")
			if got.Verdict == CheckFail && strings.Contains(got.Saw, "was not answered") {
				break
			}
			if within > patience {
				t.Fatalf("%+v", got)
			}
		}
	})
}

// A certificate that the system trusts and that is not by the CA file is what TLS inspection looks like.
func TestDoctorNamesAnInspector(t *testing.T) {
	cp, other := newControlPlane(t), bustest.Start(t)
	pem, err := os.ReadFile(cp.CAFile)
	must(t, err)
	d := &doctor{o: DoctorOptions{Now: time.Now, Patience: patience}, cfg: Config{Addrs: []string{cp.URL()}, TLS: true, CA: other.CAFile, Token: cp.token, ID: "edge"}}
	if f := d.configuration(); f.verdict != "" {
		t.Fatalf("%+v", f)
	}
	d.roots.AppendCertsFromPEM(pem) // as an administrator would have put it into the system's
	if f := d.secured(t.Context(), d.urls[0]); f.verdict != CheckWarn || !strings.Contains(f.saw, "not issued by the CA in RUNNER_ENROLL_CA") || !strings.Contains(f.todo, "inspects TLS") {
		t.Errorf("%+v", f)
	}
	d.cfg.CA, d.roots = "", x509.NewCertPool()
	d.roots.AppendCertsFromPEM(pem)
	if f := d.secured(t.Context(), d.urls[0]); f.verdict != "" {
		t.Errorf("a public CA: %+v", f)
	}
}

// A name that is not in the certificate is told apart from a CA that is not trusted.
func TestDoctorAndTheNameInTheCertificate(t *testing.T) {
	cp := newControlPlane(t)
	proxy := tunneltest.Start(t, &tunneltest.Proxy{Knows: map[string]string{name + ":4222": cp.Addr()}}, nil)
	d := cp.examine(t, func(c *Config, _ *DoctorOptions) { c.Addrs, c.Proxy.Proxy = []string{name}, proxy.Addr() })
	if got := d.only(t, "tls"); got.Verdict != CheckFail || !strings.Contains(got.Saw, "not "+name) || !strings.Contains(got.Todo, "RUNBUS_HOSTS") {
		t.Errorf("%+v", got)
	}
}

// A live runner of the same id goes on.
func TestDoctorLeavesTheRunnerAlone(t *testing.T) {
	cp := newControlPlane(t)
	g := newGate()
	p := cp.start(t, nil, playing(g.fetch))
	receive(t, cp.hellos, "hello")
	running := p.assign(nil).accepted()
	receive(t, g.started, "start")
	if d := cp.examine(t, nil); !d.well() {
		t.Errorf("%+v", d)
	}
	close(g.open)
	running.completes()
	p.assign(nil).completes()
}

func TestDoctorOfAnUnreadableEnvironment(t *testing.T) {
	_, err := ConfigFromEnv(func(name string) string { return map[string]string{"RUNNER_ENROLL_TLS": "perhaps"}[name] })
	d := DiagnoseError(err)
	if c := d.only(t, "configuration"); d.Verdict != CheckFail || c.Verdict != CheckFail || !strings.Contains(c.Saw, "RUNNER_ENROLL_TLS") {
		t.Errorf("%+v", d)
	}
}

// blackHole is an address whose connections are neither accepted nor refused: its backlog is full.
func blackHole(t *testing.T) string {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	must(t, err)
	t.Cleanup(func() { _ = syscall.Close(fd) })
	must(t, syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	must(t, syscall.Listen(fd, 0))
	sa, err := syscall.Getsockname(fd)
	must(t, err)
	addr := fmt.Sprintf("127.0.0.1:%d", sa.(*syscall.SockaddrInet4).Port)
	for hung, dialled := 0, 0; dialled < 16; dialled++ { // until they hang: one alone may have been held up by the machine
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err != nil {
			if hung++; hung == 2 {
				return addr
			}
			continue
		}
		hung = 0
		t.Cleanup(func() { _ = c.Close() })
	}
	t.Fatal("the backlog does not fill up")
	return ""
}

// lines is a TCP proxy that changes each line from target before the client gets it; nil drops it. Without a target it writes one
// line of its own.
func lines(t *testing.T, target string, change func([]byte) []byte) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer c.Close()
				if target == "" {
					_, _ = c.Write(change(nil))
					return
				}
				s, err := net.Dial("tcp", target)
				if err != nil {
					return
				}
				all.Go(func() { _, _ = io.Copy(s, c); _ = s.Close() })
				for r := bufio.NewReader(s); ; {
					line, err := r.ReadBytes('\n')
					if _, werr := c.Write(change(line)); err != nil || werr != nil {
						_ = s.Close()
						return
					}
				}
			})
		}
	})
	t.Cleanup(func() { _ = l.Close(); all.Wait() })
	return l.Addr().String()
}
