// Package plane is the control plane of a benchmark: the product's whole one, in a process of its own.
package plane

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/org-runink/runbus/cp"
	"github.com/org-runink/runbus/tests/bench/proc"
)

// Role is the child's.
const Role = "plane"

// Serve is the child: it runs a control plane as the environment says (RUNBUS_…) until its input ends, and obeys what commands, if not
// nil, gives for it.
func Serve(commands func(*cp.ControlPlane) map[string]proc.Command) error {
	floor := make([]byte, 32<<20) // as the product's programs do (cmd/internal/process): the collector rests
	defer runtime.KeepAlive(floor)
	cfg, err := cp.ConfigFromEnv(os.Getenv)
	if err != nil {
		return err
	}
	level := slog.LevelError
	if os.Getenv("BENCH_VERBOSE") != "" {
		level = slog.LevelInfo
	}
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	c, err := cp.Start(context.Background(), cfg)
	if err != nil {
		return err
	}
	var own map[string]proc.Command
	if commands != nil {
		own = commands(c)
	}
	err = proc.Serve(c.Endpoints(), own)
	c.Stop()
	return err
}

// Plane is a running control plane.
type Plane struct {
	*proc.Child
	cp.Endpoints
	token string
	dir   string
	addr  string
}

// Start starts one with its data in dir, on free ports of loopback.
func Start(dir string) (*Plane, error) {
	addr, err := FreeAddress()
	if err != nil {
		return nil, err
	}
	p := &Plane{dir: dir, addr: addr}
	return p, p.Again()
}

// Again starts it on the same data folder and the same port for runners, once the one before has ended.
func (p *Plane) Again() (err error) {
	p.Child, err = proc.Start(Role, []string{
		"RUNBUS_DATA_DIR=" + p.dir, "RUNBUS_HTTP=127.0.0.1:0", "RUNBUS_NATS=" + p.addr,
	}, &p.Endpoints)
	if err != nil {
		return err
	}
	token, err := os.ReadFile(p.AdminToken)
	p.token = strings.TrimSpace(string(token))
	return err
}

// FreeAddress is one that another start can have too: its port is below those that a system gives to whoever asks for any.
func FreeAddress() (string, error) {
	for tries := 0; ; tries++ {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 10_000+rand.IntN(22_000))) //nolint:noctx,gosec // loopback, at once; no secret
		if err == nil {
			return l.Addr().String(), l.Close()
		}
		if tries == 100 {
			return "", err
		}
	}
}

// Addr is where runners enrol, host:port.
func (p *Plane) Addr() string { return p.addr }

// MintKey mints a service-account key.
func (p *Plane) MintKey(ctx context.Context, name string) (token string, err error) {
	body, err := json.Marshal(map[string]string{"name": name})
	if err != nil {
		return "", err
	}
	resp, err := p.Send(ctx, http.MethodPost, "/api/service-account-keys", body, "application/json")
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	var made struct{ Token string }
	if err := json.NewDecoder(resp.Body).Decode(&made); err != nil {
		return "", err
	}
	if made.Token == "" {
		return "", fmt.Errorf("a key was not minted: %s", resp.Status)
	}
	return made.Token, nil
}

// Send makes one call of the API as the local tenant's admin.
func (p *Plane) Send(ctx context.Context, method, path string, body []byte, accept string) (*http.Response, error) {
	return Send(ctx, p.HTTP, p.token, method, path, body, accept)
}

// Token is the admin's.
func (p *Plane) Token() string { return p.token }

// Send makes one call of an API.
func Send(ctx context.Context, url, token, method, path string, body []byte, accept string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, url+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+token)
	req.Header.Set("Accept", accept)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	return http.DefaultClient.Do(req)
}

// AwaitRunners waits until the control plane counts so many connected runners, for three minutes at most: a runner knows before that it is
// enrolled.
func (p *Plane) AwaitRunners(ctx context.Context, n int) error {
	for give := time.Now().Add(3 * time.Minute); ; <-time.After(20 * time.Millisecond) {
		connected, err := p.Metric(ctx, "runbus_registry_connected_runners")
		if err != nil || int(connected) == n {
			return err
		}
		if time.Now().After(give) {
			return fmt.Errorf("the control plane counts %v runners, not %d", connected, n)
		}
	}
}

// Metric is the sum of a metric's series whose line begins with prefix.
func (p *Plane) Metric(ctx context.Context, prefix string) (float64, error) {
	resp, err := p.Send(ctx, http.MethodGet, "/metrics", nil, "text/plain")
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, err
	}
	sum, found := 0.0, false
	for line := range strings.SplitSeq(string(text), "\n") {
		if !strings.HasPrefix(line, prefix) {
			continue
		}
		var v float64
		if _, err := fmt.Sscan(line[strings.LastIndexByte(line, ' ')+1:], &v); err != nil {
			return 0, err
		}
		sum, found = sum+v, true
	}
	if !found {
		return 0, errors.New("no metric " + prefix)
	}
	return sum, nil
}
