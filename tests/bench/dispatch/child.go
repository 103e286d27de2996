package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/runner"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
	"github.com/org-runink/runbus/tests/bench/proc"
)

// The roles of child processes: the product's runner, which has one of Go's processors while that is enough, and the runner's side of the
// controls, which have Go's default as their users would.
const (
	runnerRole   = "runner"
	controlsRole = "controls"
)

// children are the processes on the runner's side: the product's, and that of all controls.
type children struct{ runner, controls *child }

func startChildren(p *plane, dir, journal string) (c children, err error) {
	if c.runner, err = startChild(p, runnerRole, dir, journal); err != nil {
		return c, err
	}
	if c.controls, err = startChild(p, controlsRole, dir, journal); err != nil {
		return c, errors.Join(err, c.runner.stop())
	}
	return c, nil
}

// of is the process that answers a path.
func (c children) of(path string) *child {
	if path == productPath {
		return c.runner
	}
	return c.controls
}

func (c children) stop() error { return errors.Join(c.runner.stop(), c.controls.stop()) }

// child is one such process, as its parent has it. Commands go to its standard input, each is answered by a line.
type child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func startChild(p *plane, role, dir, journal string) (*child, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &child{cmd: exec.Command(exe, role)} //nolint:gosec,noctx // this program itself; stop ends it
	c.cmd.Env = append(os.Environ(), "RUNNER_ENROLL_ADDR="+p.server.Addr(), "RUNNER_ENROLL_TOKEN="+p.token, "RUNNER_ENROLL_CA="+p.caFile,
		"RUNNER_ID="+runnerID, "RUNNER_CONCURRENCY=1024", "RUNNER_JOURNAL="+journal,
		"CORE_RUNNER_STATE_DIR="+filepath.Join(dir, "runner"), "BENCH_TWIN="+p.grpc.addr)
	c.cmd.Stderr = os.Stderr
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.out = bufio.NewReader(out)
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	line, err := c.out.ReadString('\n')
	if err != nil || line != "ready\n" {
		return nil, errors.Join(fmt.Errorf("the process of the %s did not start: %q, %w", role, line, err), c.stop())
	}
	return c, nil
}

func (c *child) ask(command string) (string, error) {
	if _, err := fmt.Fprintln(c.in, command); err != nil {
		return "", err
	}
	line, err := c.out.ReadString('\n')
	return strings.TrimSpace(line), err
}

func (c *child) command(command string) error {
	line, err := c.ask(command)
	if err == nil && line != "ok" {
		err = fmt.Errorf("a child process: %s", line)
	}
	return err
}

func (c *child) cpu() (time.Duration, error) {
	line, err := c.ask("cpu")
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(line, 10, 64)
	return time.Duration(n), err
}

func (c *child) resultSize(n int) error { return c.command("size " + strconv.Itoa(n)) }

// stop closes the child's input, which ends it.
func (c *child) stop() error { return errors.Join(c.in.Close(), c.cmd.Wait()) }

// runRunner is the child that is the product's runner.
func runRunner() error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	cfg, err := runner.ConfigFromEnv(os.Getenv)
	if err != nil {
		return err
	}
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	cfg.Log = slog.New(slog.NewTextHandler(null, nil)) // the lines are made and written as ever
	nothing, err := newNothing(randomBytes(1024))
	if err != nil {
		return err
	}
	cfg.FitProcessors = true // as core-runner does
	cfg.Connectors = func(string) (source.Connector, error) { return nothing, nil }
	agent, err := runner.New(cfg)
	if err != nil {
		return err
	}
	failed := make(chan error, 1)
	go func() { failed <- agent.Run(ctx) }()
	return serve(nil, failed)
}

// runControls is the child that answers the controls.
func runControls() error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	cfg, err := runner.ConfigFromEnv(os.Getenv)
	if err != nil {
		return err
	}
	var result atomic.Pointer[[]byte]
	row := randomBytes(1024)
	result.Store(&row)
	if err := answerRaw(cfg.Addrs[0], cfg.CA, cfg.Token, &result); err != nil {
		return err
	}
	pem, err := os.ReadFile(cfg.CA)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	failed := make(chan error, 1)
	go func() {
		failed <- attachRunner(ctx, os.Getenv("BENCH_TWIN"), &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: roots}, &result)
	}()
	return serve(&result, failed)
}

// say is what the parent reads.
var say = proc.Out{W: os.Stdout}

// serve obeys the parent until that closes the input, or something has failed.
func serve(result *atomic.Pointer[[]byte], failed <-chan error) error {
	say.Printf("ready\n")
	ended := make(chan struct{})
	go func() { obey(os.Stdin, result); close(ended) }()
	select {
	case <-ended:
		return nil
	case err := <-failed:
		return err
	}
}

func randomBytes(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b) // does not fail
	return b
}

// obey does what the parent says until it closes the input.
func obey(in io.Reader, result *atomic.Pointer[[]byte]) {
	var profile *os.File
	for lines := bufio.NewScanner(in); lines.Scan(); {
		word, arg, _ := strings.Cut(lines.Text(), " ")
		answer := "ok"
		switch word {
		case "cpu":
			answer = strconv.FormatInt(int64(cpuHere()), 10)
		case "size":
			n, err := strconv.Atoi(arg)
			if err != nil {
				answer = err.Error()
				break
			}
			b := randomBytes(n)
			result.Store(&b)
		case "profile":
			f, err := os.Create(arg)
			if err == nil {
				err = pprof.StartCPUProfile(f)
			}
			if err != nil {
				answer = err.Error()
			}
			profile = f
		case "profiled":
			pprof.StopCPUProfile()
			if err := errors.Join(profile.Close(), writeAllocs(arg)); err != nil {
				answer = err.Error()
			}
		}
		say.Printf("%s\n", answer)
	}
}

// answerRaw answers the raw control in the subscription's callback.
func answerRaw(addr, ca, token string, result *atomic.Pointer[[]byte]) error {
	secret, err := schemas.ParseServiceToken(token)
	if err != nil {
		return err
	}
	public, err := secret.Key.PublicKey()
	if err != nil {
		return err
	}
	nc, err := nats.Connect("tls://"+addr, nats.RootCAs(ca), nats.Nkey(public, secret.Key.Sign),
		nats.Name(schemas.ConnectName(rawID, schemas.NewID())), nats.CustomInboxPrefix(schemas.InboxPrefix(rawRef)),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { fmt.Fprintln(os.Stderr, "raw:", err) }))
	if err != nil {
		return err
	}
	if _, err := nc.Subscribe(schemas.WorkSubject(rawRef, "raw"), func(msg *nats.Msg) { _ = nc.Publish(msg.Reply, *result.Load()) }); err != nil {
		return err
	}
	return nc.Flush()
}

// nothing is a connector that touches no source: one row of one column.
type nothing struct {
	schema *arrow.Schema
	batch  arrow.RecordBatch
}

func newNothing(row []byte) (*nothing, error) {
	n := &nothing{schema: arrow.NewSchema([]arrow.Field{{Name: "row", Type: arrow.BinaryTypes.Binary}}, nil)}
	b := array.NewRecordBuilder(source.Env{}.Allocator(), n.schema)
	defer b.Release()
	column, ok := b.Field(0).(*array.BinaryBuilder)
	if !ok {
		return nil, errors.New("not a binary column")
	}
	column.Append(row)
	n.batch = b.NewRecordBatch()
	return n, nil
}

func (n *nothing) Kind() string { return kind }

func (n *nothing) Fetch(_ context.Context, _ source.Env, _ source.Request, out *source.Output) error {
	if err := out.Start(n.schema); err != nil {
		return err
	}
	return out.Write(n.batch)
}
