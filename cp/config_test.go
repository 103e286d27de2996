package cp

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
)

func env(pairs map[string]string) func(string) string {
	return func(name string) string { return pairs[name] }
}

// Every variable that a control plane reads, by its field.
func TestConfigFromEnv(t *testing.T) {
	got, err := ConfigFromEnv(env(map[string]string{
		"RUNBUS_DATA_DIR": "/data", "RUNBUS_HTTP": "127.0.0.1:1", "RUNBUS_NATS": "127.0.0.1:2", "RUNBUS_WEBSOCKET": "127.0.0.1:3",
		"RUNBUS_TLS_CERT": "c.pem", "RUNBUS_TLS_KEY": "k.pem", "RUNBUS_HOSTS": " a, b ,,", "RUNBUS_HTTP_TLS": "true", "RUNBUS_BEHIND_PROXY": "1",
		"RUNBUS_NATS_PLAINTEXT": "true", "DISPATCH_TIMEOUT": "5s", "RUNNER_GRACE": "20s", "RUNBUS_STOP_GRACE": "1m", "REQUIRE_RUNNER_ISOLATION": "true",
		"MANAGED_RUNNER_ENDPOINT": "local", "MANAGED_RUNNER_POLICY": "p.yaml", "MANAGED_RUNNER_FILE_ROOTS": ":/a::/b", "MANAGED_RUNNER_BINARY": "/bin/core-runner",
		"MANAGED_RUNNER_CONCURRENCY": "2", "MANAGED_RUNNER_MAX": "3", "CORE_RUNNER_DIAL_ALLOW": "10.0.0.0/8:7443", "CORE_RUNNER_DIAL_DENY": "10.9.0.0/16, *:22",
	}))
	if err != nil {
		t.Fatal(err)
	}
	want := Config{
		DataDir: "/data", HTTP: "127.0.0.1:1", NATS: "127.0.0.1:2", WebSocket: "127.0.0.1:3", CertFile: "c.pem", KeyFile: "k.pem",
		Hosts: []string{"a", "b"}, HTTPTLS: true, BehindProxy: true, PlaintextNATS: true, DispatchTimeout: 5 * time.Second, Grace: 20 * time.Second,
		StopGrace: time.Minute, Isolation: true, ManagedEndpoint: "local",
		Managed: ManagedConfig{Command: []string{"/bin/core-runner", "serve"}, Policy: "p.yaml", FileRoots: []string{"/a", "/b"}, Concurrency: 2, Most: 3},
	}
	if len(got.DialAllow) != 1 || got.DialAllow[0].String() != "10.0.0.0/8:7443" || len(got.DialDeny) != 2 || got.DialDeny[1].String() != "*:22" {
		t.Errorf("the rules of the dialler are %v and %v", got.DialAllow, got.DialDeny)
	}
	got.DialAllow, got.DialDeny = nil, nil
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	for name, values := range map[string][]string{
		"DISPATCH_TIMEOUT": {"10", "0s", "-1s", "soon"}, "RUNNER_GRACE": {"0"}, "RUNBUS_STOP_GRACE": {"x"},
		"REQUIRE_RUNNER_ISOLATION": {"yes"}, "RUNBUS_HTTP_TLS": {"on"}, "RUNBUS_BEHIND_PROXY": {"2"}, "RUNBUS_NATS_PLAINTEXT": {"maybe"},
		"MANAGED_RUNNER_CONCURRENCY": {"0", "many"}, "MANAGED_RUNNER_MAX": {"-1", "x"},
	} {
		for _, v := range values {
			if _, err := ConfigFromEnv(env(map[string]string{name: v})); schemas.CodeOf(err) != schemas.CodeInvalid || !strings.HasPrefix(err.Error(), name+" is ") {
				t.Errorf("%s=%s: %v", name, v, err)
			}
		}
	}
	for _, name := range []string{"CORE_RUNNER_DIAL_ALLOW", "CORE_RUNNER_DIAL_DENY"} {
		if _, err := ConfigFromEnv(env(map[string]string{name: "edge.example.com"})); schemas.CodeOf(err) != schemas.CodeInvalid || !strings.HasPrefix(err.Error(), name+": ") {
			t.Errorf("%s: %v", name, err)
		}
	}
	var c Config
	if err := c.prepare(); err != nil || c.DispatchTimeout != 10*time.Minute || c.Grace != 15*time.Second || c.HTTP != DefaultHTTP || c.NATS != DefaultNATS || c.WebSocket != "" {
		t.Errorf("the defaults are %+v, %v", c, err)
	}
}

func TestWhereTheManagedRunnerMayBe(t *testing.T) {
	for endpoint, good := range map[string]bool{
		"": true, "local": true, "none": true, "face-runner:7102": true, "[::1]:1": true,
		"lcal": false, "LOCAL": false, "host": false, ":7102": false, "host:0": false, "host:x": false, "host:65536": false, "::1:7102": false,
	} {
		c := Config{ManagedEndpoint: endpoint}
		if err := c.prepare(); (err == nil) != good || err != nil && (schemas.CodeOf(err) != schemas.CodeInvalid || !strings.HasPrefix(err.Error(), "MANAGED_RUNNER_ENDPOINT is ")) {
			t.Errorf("%q: %v", endpoint, err)
		}
	}
}

// A policy that is given and holds for nothing is no secret.
func TestAPolicyWithoutAManagedRunner(t *testing.T) {
	for policy, warned := range map[string]bool{"": false, "policy.yaml": true} {
		var log bytes.Buffer
		c := &ControlPlane{cfg: Config{ManagedEndpoint: ManagedNone, Managed: ManagedConfig{Policy: policy}, Log: slog.New(slog.NewTextHandler(&log, nil))}}
		if err := c.openManaged(t.Context(), t.Context()); err != nil || strings.Contains(log.String(), "MANAGED_RUNNER_POLICY") != warned {
			t.Errorf("%q: %v, %s", policy, err, &log)
		}
	}
}

// Whoever passes a control plane's variables on passes all.
func TestVariables(t *testing.T) {
	all := Variables()
	for _, name := range []string{"RUNBUS_HTTP", "RUNNER_GRACE", "CORE_RUNNER_ADMINS", "CORE_RUNNER_DIAL_ALLOW", "CORE_RUNNER_DIAL_DENY", "CORE_RUNNER_LEAF_LIFE", "MANAGED_RUNNER_POLICY", "MANAGED_RUNNER_MAX"} {
		if !slices.Contains(all, name) {
			t.Errorf("%s is not among %q", name, all)
		}
	}
	read := map[string]bool{}
	if _, err := ConfigFromEnv(func(name string) string { read[name] = true; return "" }); err != nil || len(read) != len(all) {
		t.Errorf("%d variables are read, %q are named: %v", len(read), all, err)
	}
}

// HTTP is in the clear on loopback only, or behind a proxy that was told of.
func TestWhereHTTPMayBePlain(t *testing.T) {
	for addr, plain := range map[string]bool{
		"127.0.0.1:0": true, "127.8.9.1:7100": true, "[::1]:7100": true, "localhost:7100": true,
		"0.0.0.0:7100": false, ":7100": false, "[::]:7100": false, "10.0.0.1:7100": false, "example.com:7100": false, "localhost.example.com:7100": false,
	} {
		c := Config{HTTP: addr}
		if err := c.prepare(); (err == nil) != plain || err != nil && (schemas.CodeOf(err) != schemas.CodeInvalid || !strings.Contains(err.Error(), addr)) {
			t.Errorf("%s: %v", addr, err)
		}
		for _, c := range []Config{{HTTP: addr, HTTPTLS: true}, {HTTP: addr, BehindProxy: true}} {
			if err := c.prepare(); err != nil {
				t.Errorf("%s with TLS %v or a proxy: %v", addr, c.HTTPTLS, err)
			}
		}
	}
	for _, c := range []Config{{HTTP: "7100"}, {NATS: "127.0.0.1"}, {WebSocket: "x"}, {CertFile: "c"}, {KeyFile: "k"}} {
		if err := c.prepare(); schemas.CodeOf(err) != schemas.CodeInvalid {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestTheLifeOfACertificateIsBounded(t *testing.T) {
	for life, good := range map[string]bool{"10s": true, "24h": true, "720h": true, "9s": false, "1ns": false, "721h": false} {
		c, err := ConfigFromEnv(env(map[string]string{"CORE_RUNNER_LEAF_LIFE": life}))
		if err == nil {
			err = c.prepare()
		}
		if (err == nil) != good || err != nil && (schemas.CodeOf(err) != schemas.CodeInvalid || !strings.HasPrefix(err.Error(), "CORE_RUNNER_LEAF_LIFE is "+life) || !strings.Contains(err.Error(), "from 10s to 720h0m0s")) {
			t.Errorf("%s: %v", life, err)
		}
	}
}

// A control plane that others reach keeps its own host to itself (egress.Rules).
func TestWhoReachesIt(t *testing.T) {
	for want, configs := range map[bool][]Config{
		false: {{}, {HTTP: "[::1]:0", WebSocket: "localhost:1"}},
		true:  {{HTTP: ":7100", HTTPTLS: true}, {NATS: "0.0.0.0:4222"}, {WebSocket: "192.0.2.1:80"}, {BehindProxy: true}},
	} {
		for _, c := range configs {
			if err := c.prepare(); err != nil || c.shared() != want {
				t.Errorf("%+v: %v, %v", c, c.shared(), err)
			}
		}
	}
}

// One control plane at a time has the folder; its lock ends with it.
func TestDataDir(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	d, err := openDataDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(dir)
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if _, err := openDataDir(dir); schemas.CodeOf(err) != schemas.CodeConflict || !strings.Contains(err.Error(), "in use by another control plane") {
		t.Errorf("a second one: %v", err)
	}
	if _, fresh, err := d.format(); err != nil || !fresh {
		t.Errorf("a new folder is fresh: %v, %v", fresh, err)
	}
	if err := d.initialised(); err != nil {
		t.Fatal(err)
	}
	if format, fresh, err := d.format(); err != nil || fresh || format != jetstream.Format {
		t.Errorf("an initialised folder has format %d, fresh: %v, %v", format, fresh, err)
	}
	for text, want := range map[string]int{initialisedText: 1, initialisedText + "format 1\n": 1, initialisedText + "format 99\n": 0, initialisedText + "format": 0, "x": 0, "": 0} {
		if err := os.WriteFile(d.file(fileInitialised), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if format, fresh, err := d.format(); format != want || fresh || (err == nil) != (want > 0) {
			t.Errorf("%q is format %d, fresh: %v, %v", text, format, fresh, err)
		}
	}
	d.close()
	again, err := openDataDir(dir)
	if err != nil {
		t.Fatalf("after the first has ended: %v", err)
	}
	again.close()

	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, filepath.Join(file, "below")} {
		_, err := openDataDir(path)
		if schemas.CodeOf(err) != schemas.CodeInvalid || !strings.Contains(err.Error(), "can't be made") || strings.Count(err.Error(), path) != 1 {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// A start that fails late leaves nothing: no lock, no listener, and (by TestMain) no goroutine.
func TestAFailedStartLeavesNothing(t *testing.T) {
	dir := private(t)
	cfg := testConfig(t, dir)
	cfg.HTTPTLS, cfg.CertFile, cfg.KeyFile = true, filepath.Join(dir, "none.pem"), filepath.Join(dir, "none.key")
	if _, err := Start(t.Context(), cfg); err == nil {
		t.Fatal("it starts without its certificate")
	}
	c := start(t, testConfig(t, dir))
	c.Stop()
}
