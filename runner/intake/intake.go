// Package intake is the listening side of a runner that its control plane dials (SPEC C1): it bounds who may knock, shakes hands, and
// tells enrolments from links by their ALPN. Of links exactly one is in use, which the NATS client of the runner runs on.
package intake

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/time/rate"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Defaults of Config.
const (
	HandshakeWithin = 10 * time.Second
	PerAddress      = 64
	Total           = 1024
)

// maxEarly is how many bytes a client may send before the handshake has ended. A control plane sends some four thousand; without the
// bound a stranger may keep 256 KiB in memory with a certificate alone.
const maxEarly = 16 << 10

// Config is what an Intake needs. TLS, Enrol and Link are required.
type Config struct {
	// Listen is host:port; an empty host is every address of this host, IPv4 and IPv6.
	Listen string
	// TLS is the configuration for one connection of this ALPN (link.ProtoEnrol, link.ProtoLink), or why there is none now.
	TLS func(proto string) (*tls.Config, error)
	// Enrol serves one enrolment after the handshake, and logs why it failed; the connection is closed when it returns.
	Enrol func(ctx context.Context, conn *tls.Conn) error
	// Link decides on one link after its preface; leaf is the hex SHA-256 of the certificate that this side presented. Nil: it was
	// taken, and the connection lives on. An error refuses it.
	Link func(ctx context.Context, conn *tls.Conn, p *runbusv1.LinkPreface, leaf string) error
	// Conn makes of a connection's socket what is read from once the handshake has ended. Nil: it stays.
	Conn func(net.Conn) net.Conn
	// HandshakeWithin bounds the time from the connection to the end of the handshake, the preface included. Zero means the default.
	HandshakeWithin time.Duration
	// EnrolWithin bounds an enrolment after its handshake. Zero means 30 s.
	EnrolWithin time.Duration
	// PerAddress and Total bound the connections that have not shaken hands yet. Zero means the defaults.
	PerAddress, Total int
	Log               *slog.Logger
}

// Intake is a listener. Make it with Open, then Serve.
type Intake struct {
	c        Config
	listener net.Listener
	gate     *gate
	quiet    *rate.Limiter // of what anybody can cause
}

// Open takes the port. That it can't is a *schemas.Error with a hint, which wraps the reason, syscall.EADDRINUSE for a taken one.
func Open(ctx context.Context, c Config) (*Intake, error) {
	for _, d := range []struct {
		field    *time.Duration
		fallback time.Duration
	}{{&c.HandshakeWithin, HandshakeWithin}, {&c.EnrolWithin, 30 * time.Second}} {
		if *d.field == 0 {
			*d.field = d.fallback
		}
	}
	if c.PerAddress == 0 {
		c.PerAddress = PerAddress
	}
	if c.Total == 0 {
		c.Total = Total
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", c.Listen)
	if err != nil {
		return nil, schemas.Errorf(schemas.CodeUnavailable, "listen for the control plane on %s: %w", c.Listen, reason(err)).WithHint(remedy(err))
	}
	return &Intake{c: c, listener: l, gate: newGate(c.PerAddress, c.Total), quiet: rate.NewLimiter(5, 20)}, nil
}

// reason leaves out what the text around it says already.
func reason(err error) error {
	var op *net.OpError
	if errors.As(err, &op) {
		return op.Err
	}
	return err
}

// remedy is what to do about a port that can't be taken.
func remedy(err error) string {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return "another process listens there: stop it, or give this runner another port with --listen (CORE_RUNNER_LISTEN), and the control plane the new address: `runink runner edit --address HOST:PORT NAME`"
	case errors.Is(err, syscall.EACCES):
		return "this user may not listen on that port: choose one from 1024 on with --listen (CORE_RUNNER_LISTEN)"
	}
	return "--listen (CORE_RUNNER_LISTEN) must name an address of this host, or none, as in :7443"
}

// Addr is where it listens, with the port that was taken.
func (i *Intake) Addr() net.Addr { return i.listener.Addr() }

// Close frees the port; Serve then returns. Serve does it too.
func (i *Intake) Close() error { return i.listener.Close() }

// Serve takes connections until ctx ends, then closes those that are not links and returns nil when all of them have ended. An
// error means that the port can't be used any more.
func (i *Intake) Serve(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var serving sync.WaitGroup
	defer serving.Wait()
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = i.listener.Close() })()
	for {
		conn, err := i.listener.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = conn.Close()
			}
			return nil
		case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.ECONNABORTED):
			i.log(slog.LevelWarn, "a connection could not be taken", "error", reason(err))
			if !pause(ctx, 50*time.Millisecond) {
				return nil
			}
			continue
		case err != nil:
			return fmt.Errorf("listen for the control plane: %w", reason(err))
		}
		v := i.gate.enter(conn)
		serving.Go(func() {
			defer i.gate.leave(v)
			i.serve(ctx, conn, v)
		})
	}
}

func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// serve shakes hands and hands the connection on.
func (i *Intake) serve(ctx context.Context, raw net.Conn, v *visit) {
	peer := raw.RemoteAddr().String()
	deadline := time.Now().Add(i.c.HandshakeWithin)
	stop := context.AfterFunc(ctx, func() { _ = raw.Close() })
	defer stop()
	taken := false
	defer func() {
		if !taken {
			_ = raw.Close()
		}
	}()
	if err := errors.Join(raw.SetDeadline(deadline), link.SetUserTimeout(raw, link.UserTimeout)); err != nil {
		return // it has gone
	}
	leaf := ""
	early := &earlyConn{Conn: raw, left: maxEarly}
	conn := tls.Server(early, &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		c, err := i.configFor(hello)
		if err == nil && len(c.Certificates) > 0 {
			sum := sha256.Sum256(c.Certificates[0].Certificate[0])
			leaf = hex.EncodeToString(sum[:])
		}
		return c, err
	}})
	if err := conn.HandshakeContext(ctx); err != nil {
		i.refused(ctx, peer, "the handshake failed", err)
		return
	}
	early.over = true
	if i.c.Conn != nil {
		early.Conn = i.c.Conn(raw)
	}
	i.gate.leave(v) // who has proved to be the control plane gives way to no stranger
	switch proto := conn.ConnectionState().NegotiatedProtocol; proto {
	case link.ProtoEnrol:
		ctx, cancel := context.WithTimeout(ctx, i.c.EnrolWithin)
		defer cancel()
		if err := raw.SetDeadline(time.Now().Add(i.c.EnrolWithin)); err != nil {
			return
		}
		if err := i.c.Enrol(ctx, conn); err != nil {
			i.log(slog.LevelDebug, "an enrolment failed", "peer", peer, "error", err)
		}
		_ = conn.Close() // the peer has what was sent, or does not want it
	case link.ProtoLink:
		p, err := link.Receive(conn, deadline)
		if err != nil {
			i.refused(ctx, peer, "no preface came", err)
			return
		}
		if err := i.c.Link(ctx, conn, p, leaf); err != nil {
			i.log(slog.LevelInfo, "a link was refused", "peer", peer, "replica", p.GetReplica(), "error", err)
			link.Refuse(conn, err)
			return
		}
		taken = true
	}
}

// earlyConn is a connection of which only so many bytes are read until the handshake is over.
type earlyConn struct {
	net.Conn
	left int
	over bool // set between the reads of the handshake and those of what follows
}

// errEarly ends a handshake in which too much is said.
var errEarly = fmt.Errorf("more than %d bytes came before the end of the handshake", maxEarly)

// Read reads; during the handshake it is errEarly when all that may come has come.
func (c *earlyConn) Read(b []byte) (int, error) {
	if c.over {
		return c.Conn.Read(b)
	}
	if c.left <= 0 {
		return 0, errEarly
	}
	n, err := c.Conn.Read(b[:min(len(b), c.left)])
	c.left -= n
	return n, err
}

// errNoProtocol refuses a client that offers none of ours.
var errNoProtocol = errors.New("the client offers neither " + link.ProtoEnrol + " nor " + link.ProtoLink)

// configFor prefers a link: whoever offers both wants to enrol only a runner that can't have one yet.
func (i *Intake) configFor(hello *tls.ClientHelloInfo) (*tls.Config, error) {
	why := errNoProtocol
	for _, proto := range []string{link.ProtoLink, link.ProtoEnrol} {
		if !slices.Contains(hello.SupportedProtos, proto) {
			continue
		}
		c, err := i.c.TLS(proto)
		if err != nil {
			why = err
			continue
		}
		c = c.Clone()
		c.MinVersion, c.NextProtos = tls.VersionTLS13, []string{proto}
		c.SessionTicketsDisabled = true // each connection proves itself by its own handshake
		return c, nil
	}
	return nil, why
}

// refused logs what a stranger can cause: seldom, and quietly what is only an end.
func (i *Intake) refused(ctx context.Context, peer, what string, err error) {
	if ctx.Err() != nil {
		return
	}
	level := slog.LevelWarn
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, os.ErrDeadlineExceeded) {
		level = slog.LevelDebug
	}
	i.log(level, what, "peer", peer, "error", err)
}

func (i *Intake) log(level slog.Level, text string, kv ...any) {
	if level < slog.LevelInfo || i.quiet.Allow() {
		i.c.Log.Log(context.Background(), level, text, kv...)
	}
}
