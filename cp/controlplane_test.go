package cp

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/schemas"
)

func TestMain(m *testing.M) {
	// A server that is stopped just after its mirrors were made keeps this one until its own time-out.
	leak.Main(m, goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server.(*stream).setupMirrorConsumer.func3"))
}

const patience = 3 * time.Minute

// testConfig is a control plane on free ports in dir.
func testConfig(t *testing.T, dir string) Config {
	return Config{
		DataDir: dir, HTTP: "127.0.0.1:0", NATS: "127.0.0.1:0", StopGrace: time.Second,
		Log: slog.New(slog.NewTextHandler(bustest.Output(t), nil)),
	}
}

func start(t *testing.T, cfg Config) *ControlPlane {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := Start(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// private is a folder that the control plane takes.
func private(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "data")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

// The first part that fails ends all, and Wait says which: a process that goes on without its callout lets nobody in.
func TestThePartThatFailsEndsAll(t *testing.T) {
	c := start(t, testConfig(t, private(t)))
	defer c.Stop()
	waited := make(chan error, 1)
	go func() { waited <- c.Wait() }()
	for _, nc := range c.connections() {
		if strings.HasPrefix(nc.Opts.Name, "runbus-auth/") {
			nc.Close()
		}
	}
	select {
	case err := <-waited:
		if err == nil || !strings.HasPrefix(err.Error(), "callout: ") {
			t.Fatalf("Wait = %v, want the callout's failure", err)
		}
	case <-time.After(patience):
		t.Fatal("a part has failed and the others go on")
	}
}

// Stop makes Wait return nil, leaves the folder to the next start, and that finds what was there.
func TestStopAndStartAgain(t *testing.T) {
	dir := private(t)
	c := start(t, testConfig(t, dir))
	token, err := os.ReadFile(c.Endpoints().AdminToken)
	if err != nil {
		t.Fatal(err)
	}
	waited := make(chan error, 1)
	go func() { waited <- c.Wait() }()
	c.Stop()
	if err := <-waited; err != nil {
		t.Errorf("Wait = %v after Stop", err)
	}
	again := start(t, testConfig(t, dir))
	defer again.Stop()
	if _, err := again.auth.Authenticate(strings.TrimSpace(string(token))); err != nil {
		t.Errorf("the admin's token after another start: %v", err)
	}
}

// A second control plane on the folder, a folder open to others and a taken port are told apart, each by a text with a hint.
func TestStartRefusals(t *testing.T) {
	dir := private(t)
	c := start(t, testConfig(t, dir))
	defer c.Stop()
	open := filepath.Join(t.TempDir(), "open")
	if err := os.Mkdir(open, 0o755); err != nil { // what is to be refused
		t.Fatal(err)
	}
	taken := func(change func(*Config)) Config {
		cfg := testConfig(t, private(t))
		change(&cfg)
		return cfg
	}
	for name, w := range map[string]struct {
		cfg  Config
		code schemas.Code
		text string
	}{
		"folder in use":  {testConfig(t, dir), schemas.CodeConflict, "in use by another control plane"},
		"folder open":    {testConfig(t, open), schemas.CodeInvalid, "open to others"},
		"HTTP taken":     {taken(func(c2 *Config) { c2.HTTP = c.listener.Addr().String() }), schemas.CodeConflict, c.listener.Addr().String()},
		"NATS taken":     {taken(func(c2 *Config) { c2.NATS = c.server.Addr() }), schemas.CodeConflict, c.server.Addr()},
		"HTTP in clear":  {taken(func(c2 *Config) { c2.HTTP = "0.0.0.0:0" }), schemas.CodeInvalid, "in the clear"},
		"CA open":        {taken(func(c2 *Config) { c2.RunnerCADir, c2.HTTP = open, c.listener.Addr().String() }), schemas.CodeInvalid, "the folder of the runner CA " + open + " is open to others"},
		"half a keypair": {taken(func(c2 *Config) { c2.CertFile = "x.pem" }), schemas.CodeInvalid, "come together"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Start(t.Context(), w.cfg)
			var known *schemas.Error
			if !errors.As(err, &known) || known.Code != w.code || !strings.Contains(known.Message, w.text) {
				t.Errorf("Start = %v, want %s with %q", err, w.code, w.text)
			}
		})
	}
}

// /readyz may be asked while the start goes on.
func TestReadinessDuringTheStart(t *testing.T) {
	ask := make(chan string, 1)
	c := start(t, testConfig(t, private(t)))
	defer c.Stop()
	var asking sync.WaitGroup
	asking.Go(func() { ask <- readiness(t, c) })
	if _, err := c.conn(t.Context(), "auth"); err != nil { // what a step of the start does
		t.Error(err)
	}
	asking.Wait()
	if status := <-ask; status != "ready" {
		t.Errorf("status = %q", status)
	}
}

// silent is a server of this process that says nothing.
type silent chan net.Conn

// InProcessConn is nats.InProcessConnProvider.
func (s silent) InProcessConn() (net.Conn, error) {
	client, server := net.Pipe()
	s <- server
	return client, nil
}

// Who stops a control plane that is starting does not wait until its own server lets it in.
func TestAStartThatHangsCanBeStopped(t *testing.T) {
	c := start(t, testConfig(t, private(t)))
	ctx, cancel := context.WithCancel(t.Context())
	server, failed := make(silent), make(chan error, 1)
	go func() {
		_, err := c.conn(ctx, "auth", nats.InProcessServer(server))
		failed <- err
	}()
	pipe := <-server
	cancel()
	if err := <-failed; !errors.Is(err, context.Canceled) {
		t.Errorf("connecting: %v", err)
	}
	c.Stop()
	if err := pipe.Close(); err != nil {
		t.Error(err)
	}
}

// A person's session can be renewed before it ends: the old token is worth nothing from then on.
func TestRenewASession(t *testing.T) {
	c := start(t, testConfig(t, private(t)))
	defer c.Stop()
	body, err := os.ReadFile(c.Endpoints().AdminToken)
	if err != nil {
		t.Fatal(err)
	}
	admin := strings.TrimSpace(string(body))
	var made, renewed struct{ Token string }
	if status := call(t, c, http.MethodPost, "/api/people", admin, `{"name":"ada","role":"READER"}`, &made); status != http.StatusCreated {
		t.Fatalf("create: %d", status)
	}
	if status := call(t, c, http.MethodPost, "/api/people/ada/session", made.Token, "", nil); status != http.StatusForbidden {
		t.Errorf("a READER renews a session: %d", status)
	}
	if status := call(t, c, http.MethodPost, "/api/people/nobody/session", admin, "", nil); status != http.StatusNotFound {
		t.Errorf("renew nobody's session: %d", status)
	}
	if status := call(t, c, http.MethodPost, "/api/people/ada/session", admin, "", &renewed); status != http.StatusCreated {
		t.Fatalf("renew: %d", status)
	}
	for token, want := range map[string]int{made.Token: http.StatusUnauthorized, renewed.Token: http.StatusOK} {
		if status := call(t, c, http.MethodGet, "/api/session", token, "", nil); status != want {
			t.Errorf("status %d, want %d", status, want)
		}
	}
}

func readiness(t *testing.T, c *ControlPlane) string {
	var body struct{ Status string }
	call(t, c, http.MethodGet, "/readyz", "", "", &body)
	return body.Status
}

// call makes one call of the API. It may run beside the test.
func call(t *testing.T, c *ControlPlane, method, path, token, body string, out any) (status int) {
	req, err := http.NewRequestWithContext(t.Context(), method, c.Endpoints().HTTP+path, strings.NewReader(body))
	if err != nil {
		t.Error(err)
		return 0
	}
	req.Header.Set("Authorization", "Bearer "+token)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	resp, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		t.Error(err)
		return 0
	}
	defer resp.Body.Close()
	if out != nil {
		if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
			t.Error(err)
		}
	}
	return resp.StatusCode
}
