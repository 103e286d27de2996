package embedded_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/internal/natsdial"
	"github.com/org-runink/runbus/schemas"
)

// soon bounds the wait for an event that must come.
const soon = time.Minute

func TestStartOnATakenAddress(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	taken := l.Addr().String()
	for name, change := range map[string]func(c *embedded.Config){
		"client port": func(c *embedded.Config) { c.Listen = taken },
		"WebSocket":   func(c *embedded.Config) { c.WebSocket = taken },
	} {
		t.Run(name, func(t *testing.T) {
			c := config(t)
			change(&c)
			_, err := embedded.Start(c)
			var e *schemas.Error
			if !errors.As(err, &e) || e.Code != schemas.CodeConflict || e.Message != "address "+taken+" is already in use" || e.Hint == "" {
				t.Errorf("got %#v", err)
			}
			if !errors.Is(err, syscall.EADDRINUSE) {
				t.Errorf("the cause is lost: %v", err)
			}
			if _, err := os.Stat(c.StoreDir); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("something was written before: %v", err)
			}
		})
	}
}

func TestStartOnAnAddressOfAnotherMachine(t *testing.T) {
	c := config(t)
	c.Listen = "192.0.2.1:0" // TEST-NET
	_, err := embedded.Start(c)
	if !errors.Is(err, &schemas.Error{Code: schemas.CodeInvalid}) || !strings.HasPrefix(err.Error(), "cannot listen on 192.0.2.1:0: ") {
		t.Errorf("got %v", err)
	}
}

func TestStartInAnUnwritableFolder(t *testing.T) {
	c := config(t)
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c.StoreDir = filepath.Join(file, "store") // fails for root too
	_, err := embedded.Start(c)
	var e *schemas.Error
	if !errors.As(err, &e) || e.Code != schemas.CodeInvalid || !strings.Contains(e.Message, "the data folder "+c.StoreDir+" cannot be written") || e.Hint == "" {
		t.Errorf("got %v", err)
	}
}

func TestStartWithADamagedCertificate(t *testing.T) {
	c := config(t)
	if err := os.WriteFile(c.CertFile, []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := embedded.Start(c); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("got %v", err)
	}
}

// What was acknowledged is there after a restart with the same keys, folder and addresses, and a client comes back.
func TestRestart(t *testing.T) {
	b := bustest.Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*soon)
	defer cancel()
	id, addr := b.ID(), b.Addr()
	js, err := natsjs.New(b.Conn(t, embedded.UserSec))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(ctx, natsjs.StreamConfig{Name: "S", Subjects: []string{"s"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(ctx, "s", []byte("kept")); err != nil {
		t.Fatal(err)
	}
	back := make(chan struct{}, 1)
	runner := b.RunnerConn(t, schemas.RunnerRef{Tenant: "acme", Runner: "r1"}, nats.ReconnectWait(20*time.Millisecond),
		nats.ReconnectHandler(func(*nats.Conn) { back <- struct{}{} }))
	b.Restart(t)
	if b.ID() == id || b.Addr() != addr {
		t.Errorf("id %s (before %s), address %s (before %s)", b.ID(), id, b.Addr(), addr)
	}
	if js, err = natsjs.New(b.Conn(t, embedded.UserSec)); err != nil {
		t.Fatal(err)
	}
	st, err := js.Stream(ctx, "S")
	if err != nil {
		t.Fatal(err)
	}
	if m, err := st.GetMsg(ctx, 1); err != nil || string(m.Data) != "kept" {
		t.Errorf("got %v, %v", m, err)
	}
	select {
	case <-back:
	case <-ctx.Done():
		t.Fatal("the runner did not come back")
	}
	if err := runner.Flush(); err != nil {
		t.Error(err)
	}
}

// Other keys on the same folder open nothing to the old ones.
func TestOtherKeysAreOtherUsers(t *testing.T) {
	b := bustest.Start(t)
	other, err := embedded.LoadKeys(filepath.Join(t.TempDir(), "keys.json"))
	if err != nil {
		t.Fatal(err)
	}
	c := config(t)
	c.Keys = other
	s := start(t, c)
	nc, err := natsdial.Connect(soon, "nats://"+s.Addr(), nats.Timeout(soon), nats.RootCAs(filepath.Join(filepath.Dir(c.CertFile), "ca.pem")), seedOption(t, b.Keys.OpsSeed()))
	if err == nil {
		nc.Close()
		t.Fatal("the ops key of another installation was let in")
	}
	if !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("got %v", err)
	}
}

func TestStartAndStopLeaveNothingBehind(t *testing.T) {
	before := goleak.IgnoreCurrent()
	c := config(t)
	for range 3 {
		s, err := embedded.Start(c)
		if err != nil {
			t.Fatal(err)
		}
		for _, u := range embedded.Users() {
			if _, err := s.Connect(u); err != nil { // closed by Shutdown
				t.Fatal(err)
			}
		}
		s.Shutdown()
		s.Shutdown()
		if _, err := s.Connect(embedded.UserSec); !errors.Is(err, &schemas.Error{Code: schemas.CodeUnavailable}) {
			t.Errorf("Connect after Shutdown: %v", err)
		}
		for give := time.Now().Add(soon); ; runtime.Gosched() { // another process may have the port meanwhile, but hardly for long
			l, err := net.Listen("tcp", s.Addr())
			if err == nil {
				err = l.Close()
			} else if time.Now().Before(give) {
				continue
			}
			if err != nil {
				t.Errorf("the port is still taken: %v", err)
			}
			break
		}
		if err := leak.Find(before); err != nil {
			t.Fatal(err)
		}
	}
}

// silent stands before the server of this process and says nothing on the first connection that is made.
type silent struct {
	nats.InProcessConnProvider
	dials int
	first chan net.Conn // the other end of it
}

func (s *silent) option(o *nats.Options) error {
	s.InProcessConnProvider, o.InProcessServer = o.InProcessServer, s
	return nil
}

// InProcessConn is nats.InProcessConnProvider.
func (s *silent) InProcessConn() (net.Conn, error) {
	if s.dials++; s.dials > 1 {
		return s.InProcessConnProvider.InProcessConn()
	}
	client, server := net.Pipe()
	s.first <- server
	return client, nil
}

// A connection that does not come about, as on a host that stands still, keeps no server from stopping, and is not tried again then.
func TestShutdownWaitsForNoConnect(t *testing.T) {
	s := start(t, config(t))
	before := &silent{first: make(chan net.Conn)}
	tried := make(chan error, 1)
	go func() {
		_, err := s.Connect(embedded.UserSec, before.option)
		tried <- err
	}()
	conn := <-before.first
	s.Shutdown()
	select {
	case err := <-tried:
		t.Errorf("the shutdown waited until there was an end of it: %v", err)
	default:
		_, err := conn.Write([]byte(`INFO {"server_id":"S","nonce":"n","max_payload":1048576}` + "\r\n"))
		if err = errors.Join(err, conn.Close()); err != nil { // while the other end writes, which is what is tried again
			t.Error(err)
		}
		if err := <-tried; !errors.Is(err, &schemas.Error{Code: schemas.CodeUnavailable}) || before.dials != 2 {
			t.Errorf("after %d dials: %v: %v", before.dials, err, errors.Unwrap(err))
		}
	}
}

func TestConnectOfAnUnknownUser(t *testing.T) {
	b := bustest.Start(t)
	for _, u := range []embedded.User{"", "nobody", "ops", "issuer", "xkey"} {
		if _, err := b.Connect(u); !errors.Is(err, &schemas.Error{Code: schemas.CodeInvalid}) {
			t.Errorf("%q: %v", u, err)
		}
	}
}

// A connection that the server dropped comes back by itself.
func TestConnectComesBackAfterAKick(t *testing.T) {
	b := bustest.Start(t)
	back := make(chan struct{}, 1)
	sec := b.Conn(t, embedded.UserSec, nats.ReconnectHandler(func(*nats.Conn) { back <- struct{}{} }))
	cid, err := sec.GetClientID()
	if err != nil {
		t.Fatal(err)
	}
	kick(t, b, cid)
	select {
	case <-back:
	case <-time.After(soon):
		t.Fatal("the connection did not come back")
	}
	if err := sec.FlushTimeout(soon); err != nil {
		t.Error(err)
	}
}
