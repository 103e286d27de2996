package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/org-runink/runbus/cmd/internal/agent"
	"github.com/org-runink/runbus/cmd/internal/controlplane"
	"github.com/org-runink/runbus/cmd/runink/demodata"
	"github.com/org-runink/runbus/schemas"
)

const (
	startWait  = 60 * time.Second // each process; a second is usual
	stopWait   = 45 * time.Second
	dataFolder = "data" // in the data folder: the sample data that the runner may read
)

// stack is a local control plane and, if wanted, a runner, each a process of its own.
type stack struct {
	plane    *child
	endpoint controlplane.Ready
	api      *client
	token    string
	runner   *child
	enrolled agent.Ready
	logs     io.Writer
}

// stackConfig says how a stack listens and where it keeps its state.
type stackConfig struct {
	dataDir, http, nats, webSocket string
	runnerID                       string // empty: no runner
	files                          []string
	logs                           io.Writer
}

// startStack brings both up; an error leaves neither running.
func startStack(ctx context.Context, cfg stackConfig) (_ *stack, err error) {
	s := &stack{logs: cfg.logs}
	defer func() {
		if err != nil {
			_ = s.stop() // the error that counts is err
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	s.plane, err = startChild(ctx, "control-plane", map[string]string{
		"RUNBUS_DATA_DIR": cfg.dataDir, "RUNBUS_HTTP": cfg.http, "RUNBUS_NATS": cfg.nats, "RUNBUS_WEBSOCKET": cfg.webSocket,
		"MANAGED_RUNNER_ENDPOINT": "local",
	}, cfg.logs, &s.endpoint)
	if err != nil {
		return nil, err
	}
	token, err := os.ReadFile(s.endpoint.AdminToken)
	if err != nil {
		return nil, fmt.Errorf("the admin's token: %w", err)
	}
	s.token = strings.TrimSpace(string(token))
	if s.api, err = newClient(endpoint{URL: s.endpoint.HTTP, Token: s.token, CA: s.endpoint.CA}); err != nil {
		return nil, err
	}
	if cfg.runnerID == "" {
		return s, nil
	}
	roots, err := s.fileRoots(cfg)
	if err != nil {
		return nil, err
	}
	key, err := s.runnerKey(ctx, cfg)
	if err != nil {
		return nil, err
	}
	s.runner, err = startChild(ctx, "runner", map[string]string{
		"SERVICE_ROLE": "runner", "RUNNER_ENROLL_ADDR": strings.TrimPrefix(s.endpoint.NATS, "tls://"), "RUNNER_ENROLL_TOKEN": key,
		"RUNNER_ENROLL_CA": s.endpoint.CA, "RUNNER_ID": cfg.runnerID, "RUNNER_NAME": cfg.runnerID,
		"RUNNER_FILE_ROOTS": strings.Join(roots, string(os.PathListSeparator)),
	}, cfg.logs, &s.enrolled)
	if err != nil {
		return nil, err
	}
	return s, s.awaitRunner(ctx)
}

// awaitRunner waits until the control plane gives work to the runner: its first heartbeat is under way when it says that it is ready.
func (s *stack) awaitRunner(ctx context.Context) error {
	const again = 5 * time.Millisecond
	for {
		var runners []struct {
			ID     string `json:"id"`
			Health struct {
				Dispatchable bool `json:"dispatchable"`
			} `json:"health"`
		}
		if err := s.api.call(ctx, http.MethodGet, "/api/runners", nil, &runners); err != nil {
			return err
		}
		for _, r := range runners {
			if r.ID == s.enrolled.RunnerID && r.Health.Dispatchable {
				return nil
			}
		}
		select {
		case <-time.After(again):
		case <-s.runner.exited:
			return s.runner.failure()
		case <-ctx.Done():
			return fmt.Errorf("the runner has enrolled and is not given work: %w", ctx.Err())
		}
	}
}

// fileRoots puts the sample data into the data folder and returns what the runner may read: that, and what was asked for.
func (s *stack) fileRoots(cfg stackConfig) ([]string, error) {
	dir := filepath.Join(s.endpoint.DataDir, dataFolder)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, demodata.Name), demodata.CSV, 0o600); err != nil {
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

// sample is the path of the sample data.
func (s *stack) sample() string {
	return filepath.Join(s.endpoint.DataDir, dataFolder, demodata.Name)
}

// runnerKey is the token of the stack's own runner: kept in the data folder (0600), minted when it is not there.
func (s *stack) runnerKey(ctx context.Context, cfg stackConfig) (string, error) {
	file, name := filepath.Join(s.endpoint.DataDir, "runner.token"), cfg.runnerID
	if b, err := os.ReadFile(file); err == nil {
		return strings.TrimSpace(string(b)), nil
	} else if !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	var made struct {
		Token string `json:"token"`
	}
	mint := func() error {
		return s.api.call(ctx, http.MethodPost, "/api/service-account-keys", map[string]string{"name": name}, &made)
	}
	err := mint()
	if schemas.CodeOf(err) == schemas.CodeConflict { // the file was lost: its key is of no use to anybody any more
		if err = s.api.call(ctx, http.MethodDelete, "/api/service-account-keys/sa-"+name, nil, nil); err == nil {
			err = mint()
		}
	}
	if err != nil {
		return "", err
	}
	return made.Token, writePrivate(file, []byte(made.Token+"\n"))
}

// stop ends the runner first, so that it can say goodbye.
func (s *stack) stop() error {
	var errs []error
	for _, c := range []*child{s.runner, s.plane} {
		if c != nil {
			errs = append(errs, c.stop(stopWait))
		}
	}
	return errors.Join(errs...)
}
