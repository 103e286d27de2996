package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/org-runink/runbus/cmd/internal/agent"
	"github.com/org-runink/runbus/cmd/internal/controlplane"
	"github.com/org-runink/runbus/cmd/runink/demodata"
	"github.com/org-runink/runbus/cp"
	"github.com/org-runink/runbus/internal/durable"
	"github.com/org-runink/runbus/schemas"
)

const (
	startWait  = 60 * time.Second // each process; a second is usual
	drainGrace = 20 * time.Second // running fetches may end
	stopSpare  = 25 * time.Second // for the rest of the end
	dataFolder = "data"           // in the data folder: the sample data that the runner may read
)

// stack is a local control plane and, if wanted, a runner, each a process of its own.
type stack struct {
	plane    *child
	grace    time.Duration // that the plane's fetches have when it stops
	endpoint controlplane.Ready
	api      *client
	token    string
	managed  string // id of the managed runner; empty without one
	runner   *child
	enrolled agent.Ready
	minted   bool // the runner's key in the data folder was of no use any more
	logs     io.Writer
}

// stackConfig says how a stack listens and where it keeps its state.
type stackConfig struct {
	dataDir, http, nats, webSocket string
	runnerID                       string // empty: no runner
	managed                        string // cp.ManagedLocal or cp.ManagedNone
	policy                         string // of the managed runner; may be empty
	files                          []string
	managedFiles                   []string          // that only the managed runner may read
	plane                          map[string]string // variables of the control plane beside those that the fields above are
	stopGrace                      time.Duration     // zero: drainGrace
	logs                           io.Writer
}

// startStack brings both up; an error leaves neither running.
func startStack(ctx context.Context, cfg stackConfig) (*stack, error) {
	s := &stack{logs: cfg.logs, grace: cmp.Or(cfg.stopGrace, drainGrace)}
	wait, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	err := s.start(wait, cfg)
	if err == nil {
		return s, nil
	}
	_ = s.stop() // the error that counts is err
	switch {
	case ctx.Err() != nil:
		return nil, schemas.Errorf(schemas.CodeCancelled, "interrupted before the stack was up; nothing runs any more")
	case wait.Err() != nil:
		return nil, schemas.Errorf(schemas.CodeFailed, "the stack was not up within %s: %w", startWait, err)
	}
	return nil, err
}

func (s *stack) start(ctx context.Context, cfg stackConfig) (err error) {
	roots, rootsErr := fileRoots(cfg) // the managed runner starts with the control plane
	plane := maps.Clone(cfg.plane)
	if plane == nil {
		plane = map[string]string{}
	}
	maps.Copy(plane, map[string]string{
		"RUNBUS_DATA_DIR": cfg.dataDir, "RUNBUS_HTTP": cfg.http, "RUNBUS_NATS": cfg.nats, "RUNBUS_WEBSOCKET": cfg.webSocket,
		"RUNBUS_STOP_GRACE": s.grace.String(), "MANAGED_RUNNER_ENDPOINT": cfg.managed, "MANAGED_RUNNER_POLICY": cfg.policy,
		"MANAGED_RUNNER_FILE_ROOTS": strings.Join(slices.Concat(roots, cfg.managedFiles), string(os.PathListSeparator)),
	})
	s.plane, err = startChild(ctx, "control-plane", plane, cfg.logs, &s.endpoint)
	if err != nil {
		return err // what is wrong with the data folder it says best
	}
	s.endpoint.HTTP, s.endpoint.NATS = fromHere(s.endpoint.HTTP), fromHere(s.endpoint.NATS)
	if rootsErr != nil {
		return rootsErr
	}
	token, err := os.ReadFile(s.endpoint.AdminToken)
	if err != nil {
		return fmt.Errorf("the admin's token: %w", err)
	}
	s.token = strings.TrimSpace(string(token))
	if s.api, err = newClient(endpoint{URL: s.endpoint.HTTP, Token: s.token, CA: s.endpoint.CA}); err != nil {
		return err
	}
	if cfg.managed == cp.ManagedLocal {
		s.managed = schemas.ConsoleRunner
	}
	if cfg.runnerID == "" {
		return s.awaitRunners(ctx)
	}
	key, err := s.keyOf(ctx, cfg)
	if err != nil {
		return err
	}
	env := map[string]string{
		"RUNNER_ENROLL_ADDR": strings.TrimPrefix(s.endpoint.NATS, "tls://"), "RUNNER_ENROLL_TOKEN_FILE": key,
		"RUNNER_ENROLL_CA": s.endpoint.CA, "RUNNER_ID": cfg.runnerID, "RUNNER_NAME": cfg.runnerID,
		"RUNNER_FILE_ROOTS": strings.Join(roots, string(os.PathListSeparator)), "RUNNER_DRAIN_GRACE": drainGrace.String(),
		"CORE_RUNNER_STATE_DIR": filepath.Join(s.endpoint.DataDir, "runner"), // its journal: the default is the host's own runner's
	}
	if s.plaintext() {
		env["RUNNER_ENROLL_TLS"] = "false"
		delete(env, "RUNNER_ENROLL_CA")
	}
	s.runner, err = startChild(ctx, "runner", env, cfg.logs, &s.enrolled)
	if err != nil {
		return err
	}
	return s.awaitRunners(ctx)
}

// awaitRunners waits until the control plane gives work to the runners of the stack: their first heartbeat is under way when they say that
// they are ready.
func (s *stack) awaitRunners(ctx context.Context) error {
	const again = 5 * time.Millisecond
	missing := map[string]bool{}
	var exited <-chan struct{}
	if s.runner != nil {
		missing[s.enrolled.RunnerID], exited = true, s.runner.exited
	}
	if s.managed != "" {
		missing[s.managed] = true
	}
	for len(missing) > 0 {
		var runners []struct {
			ID     string `json:"id"`
			Health struct {
				Dispatchable bool `json:"dispatchable"`
			} `json:"health"`
		}
		if err := patiently(ctx, func() error { return s.api.call(ctx, http.MethodGet, "/api/runners", nil, &runners) }); err != nil {
			return err
		}
		for _, r := range runners {
			if r.Health.Dispatchable {
				delete(missing, r.ID)
			}
		}
		if len(missing) == 0 {
			break
		}
		select {
		case <-time.After(again):
		case <-exited:
			return s.runner.failure()
		case <-ctx.Done():
			return fmt.Errorf("these runners are not given work: %s: %w", strings.Join(slices.Sorted(maps.Keys(missing)), ", "), ctx.Err())
		}
	}
	return nil
}

// patiently calls ask again while the control plane, which has only just started, says that it can't tell or do that at present. ctx
// bounds it.
func patiently(ctx context.Context, ask func() error) error {
	const again = 100 * time.Millisecond
	for {
		err := ask()
		if err == nil || !notNow(err) {
			return err
		}
		select {
		case <-time.After(again):
		case <-ctx.Done():
			return err
		}
	}
}

// fileRoots puts the sample data into the data folder and returns what the runners may read: that, and what was asked for.
func fileRoots(cfg stackConfig) ([]string, error) {
	base, err := filepath.Abs(cfg.dataDir)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(base, dataFolder)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if err := durable.Replace(filepath.Join(dir, demodata.Name), demodata.CSV, nil); err != nil { // it may be in use
		return nil, err
	}
	roots := []string{dir}
	for _, f := range cfg.files {
		abs, err := filepath.Abs(f)
		if err != nil {
			return nil, err
		}
		roots = append(roots, abs)
	}
	return roots, nil
}

// fromHere is the URL of a listener for this host: one on all addresses is reached, and has a certificate, on loopback.
func fromHere(listener string) string {
	u, err := url.Parse(listener)
	if err != nil {
		return listener
	}
	if ip := net.ParseIP(u.Hostname()); ip != nil && ip.IsUnspecified() {
		u.Host = net.JoinHostPort("127.0.0.1", u.Port())
	}
	return u.String()
}

// plaintext reports whether the bus has no TLS (RUNBUS_NATS_PLAINTEXT).
func (s *stack) plaintext() bool { return strings.HasPrefix(s.endpoint.NATS, "nats://") }

// sample is the path of the sample data.
func (s *stack) sample() string {
	return filepath.Join(s.endpoint.DataDir, dataFolder, demodata.Name)
}

// keyOf is runnerKey, patiently.
func (s *stack) keyOf(ctx context.Context, cfg stackConfig) (file string, err error) {
	err = patiently(ctx, func() (err error) {
		file, err = s.runnerKey(ctx, cfg)
		return err
	})
	return file, err
}

// runnerKey is the file (0600, in the data folder) with the token of the stack's own runner. A key that is missing there, or that
// was revoked or has expired, is minted anew: whoever starts the stack holds its admin's token.
func (s *stack) runnerKey(ctx context.Context, cfg stackConfig) (file string, err error) {
	file = filepath.Join(s.endpoint.DataDir, "runner.token")
	b, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	live, err := s.liveKey(ctx, "sa-"+cfg.runnerID)
	if err != nil {
		return "", err
	}
	if token, err := schemas.ParseServiceToken(strings.TrimSpace(string(b))); err == nil && live != "" {
		if public, err := token.Key.PublicKey(); err == nil && public == live {
			return file, nil
		}
	}
	if live != "" { // the token of this one was lost: it is of no use to anybody any more
		if err := s.api.call(ctx, http.MethodDelete, "/api/service-account-keys/sa-"+cfg.runnerID, nil, nil); err != nil {
			return "", err
		}
	}
	var made struct {
		Token string `json:"token"`
	}
	if err := s.api.call(ctx, http.MethodPost, "/api/service-account-keys", map[string]string{"name": cfg.runnerID}, &made); err != nil {
		return "", err
	}
	s.minted = len(b) > 0
	return file, durable.Replace(file, []byte(made.Token+"\n"), nil)
}

// liveKey is the public key of a service-account key that can enrol, "" when there is none of this id.
func (s *stack) liveKey(ctx context.Context, id string) (string, error) {
	var keys []serviceKey
	if err := s.api.call(ctx, http.MethodGet, "/api/service-account-keys", nil, &keys); err != nil {
		return "", err
	}
	for _, k := range keys {
		if k.ID == id && k.state(time.Now()) == "live" {
			return k.PublicKey, nil
		}
	}
	return "", nil
}

// stop ends the runner first, so that it can say goodbye.
func (s *stack) stop() error {
	var errs []error
	if s.runner != nil {
		errs = append(errs, s.runner.stop(drainGrace+stopSpare))
	}
	if s.plane != nil {
		errs = append(errs, s.plane.stop(s.grace+stopSpare))
	}
	return errors.Join(errs...)
}
