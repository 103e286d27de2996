package embedded

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/internal/natsdial"
	"github.com/org-runink/runbus/schemas"
)

// readyWithin is how long Start waits for the listeners, once JetStream has recovered its streams.
const readyWithin = 30 * time.Second

// connectWithin is how long Connect waits for the server. nats.go's two seconds can fail a start on a machine that is busy.
const connectWithin = 30 * time.Second

// Server is a running NATS server. It is safe for concurrent use.
type Server struct {
	ns   *server.Server
	keys *Keys
	log  *bridge

	webSocket bool // there is such a listener
	gate      *gate
	watchers  watchers

	mu      sync.Mutex
	stopped bool
	conns   []*nats.Conn // made by Connect, closed by Shutdown
}

// Start runs a server and returns when it accepts connections. Who is not a configured user is refused until somebody
// serves the callout; that subscription is the caller's last step of a start.
//
// A taken address is an error of CodeConflict that names it, an unwritable data folder one of CodeInvalid; both are found
// before anything is written.
func Start(c Config) (*Server, error) {
	text, err := ConfigText(c)
	if err != nil {
		return nil, err
	}
	if err := probeAddresses(c); err != nil {
		return nil, err
	}
	if err := probeFolder(c.StoreDir); err != nil {
		return nil, err
	}
	opts := &server.Options{}
	if err := opts.ProcessConfigString(text); err != nil {
		return nil, fmt.Errorf("configuration of the embedded server: %w", err)
	}
	opts.NoSigs = true            // signals are the process's own
	opts.NoLog = true             // the bridge has it all
	opts.AlwaysEnableNonce = true // a runner's nkey is checked by the callout, so the server must offer what it signs
	gate := newGate()
	if opts.TLSConfig != nil { // not the WebSocket listener's: the server has a hook of its own there
		opts.TLSConfig.GetConfigForClient = gate.admit
		opts.TLSConfig.SessionTicketsDisabled = true // a runner begins each connection anew, and would not use one
	}
	ns, err := server.NewServer(opts)
	if err != nil {
		return nil, fmt.Errorf("make the embedded server: %w", err)
	}
	log := c.Log
	if log == nil {
		log = slog.Default()
	}
	s := &Server{ns: ns, keys: c.Keys, log: newBridge(log), webSocket: c.WebSocket != "", gate: gate}
	ns.SetLoggerV2(s.log, false, false, false)
	ns.Start()
	if err := s.awaitReady(); err != nil {
		s.Shutdown()
		return nil, err
	}
	if s.watchers.ops, err = ns.LookupAccount("OPS"); err != nil {
		s.Shutdown()
		return nil, fmt.Errorf("find the account of ops: %w", err)
	}
	s.watchers.alone = alone(opts)
	s.log.quiet.Store(false)
	return s, nil
}

func (s *Server) awaitReady() error {
	if text := s.log.fatal.Load(); text != nil {
		return fmt.Errorf("start the embedded server: %s", *text)
	}
	if !s.ns.ReadyForConnections(readyWithin) {
		if text := s.log.fatal.Load(); text != nil {
			return fmt.Errorf("start the embedded server: %s", *text)
		}
		return fmt.Errorf("the embedded server is not ready after %s", readyWithin)
	}
	return nil
}

// probeAddresses finds out whether the addresses are free, by taking them for a moment.
func probeAddresses(c Config) error {
	for _, addr := range []string{c.Listen, c.WebSocket} {
		if addr == "" {
			continue
		}
		l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", addr)
		switch {
		case errors.Is(err, syscall.EADDRINUSE):
			return schemas.Wrap(schemas.CodeConflict, err, fmt.Sprintf("address %s is already in use", addr)).
				WithHint("stop what listens there, or choose another address")
		case err != nil:
			return schemas.Wrap(schemas.CodeInvalid, err, fmt.Sprintf("cannot listen on %s: %s", addr, reason(err)))
		}
		if err := l.Close(); err != nil {
			return fmt.Errorf("release the address %s: %w", addr, err)
		}
	}
	return nil
}

// probeFolder makes the data folder (0700) and finds out whether it can be written.
func probeFolder(dir string) error {
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		var f *os.File
		if f, err = os.CreateTemp(dir, ".probe.*"); err == nil {
			err = errors.Join(f.Close(), os.Remove(f.Name()))
		}
	}
	if err != nil {
		return schemas.Wrap(schemas.CodeInvalid, err, fmt.Sprintf("the data folder %s cannot be written: %s", dir, reason(err))).
			WithHint("make it writable for this user, or choose another folder")
	}
	return nil
}

// reason is the system's own word for err, without the operation and the name around it.
func reason(err error) string {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return err.Error()
}

// Connect makes a connection of a configured user inside the process: no socket, no TLS, the nkey signed as anywhere. It
// reconnects by itself, for as long as the server runs, after the server dropped it (slow consumer, kick). Options given
// come after those set here. Shutdown closes the connection if the caller has not, and waits for none that is being made: that ends with an
// error of CodeUnavailable.
func (s *Server) Connect(u User, o ...nats.Option) (*nats.Conn, error) {
	if s.keys.Public(u) == "" {
		return nil, schemas.Errorf(schemas.CodeInvalid, "no user %q of the embedded server", u)
	}
	options := append([]nats.Option{
		nats.InProcessServer(s.ns), nats.Timeout(connectWithin),
		nats.Name("runbus/" + string(u)),
		nats.Nkey(s.keys.Public(u), s.keys.pairs[string(u)].Sign),
		nats.MaxReconnects(-1), nats.ReconnectWait(100 * time.Millisecond), nats.ReconnectJitter(0, 0),
		nats.IgnoreAuthErrorAbort(),
		nats.WriteBufferSize(1), // what is published is written at once by its publisher, not after a turn of nats.go's flusher
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) {
			subject := ""
			if sub != nil {
				subject = sub.Subject
			}
			s.log.log.Warn("in-process connection", "user", u, "subject", subject, "error", err)
		}),
	}, o...)
	i := new(inmate)
	options = append(options, i.follow)
	if s.isStopped() {
		return nil, errStopped(nil)
	}
	nc, err := natsdial.Connect(connectWithin, "", options...) // of a server that stops the first try fails, and the next cannot begin
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.stopped:
		if err == nil {
			nc.Close()
		}
		return nil, errStopped(err)
	case err != nil:
		return nil, fmt.Errorf("connect the user %s in process: %w", u, err)
	}
	s.conns = append(slices.DeleteFunc(s.conns, (*nats.Conn).IsClosed), nc)
	s.watchers.admit(u, nc, i)
	return nc, nil
}

func (s *Server) isStopped() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stopped
}

func errStopped(cause error) *schemas.Error {
	return schemas.Wrap(schemas.CodeUnavailable, cause, "the embedded server is stopped")
}

// Addr is the client port's address, host:port, with the port that was taken.
func (s *Server) Addr() string { return hostOf(s.ns.ClientURL()) }

// WebSocketAddr is the WebSocket listener's address, host:port; "" if there is none.
func (s *Server) WebSocketAddr() string {
	if !s.webSocket {
		return "" // the server itself would say :0
	}
	return hostOf(s.ns.WebsocketURL())
}

func hostOf(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return ""
	}
	return u.Host
}

// ID is the server's id: what `$SYS.REQ.SERVER.<id>.KICK` names, another one at each start.
func (s *Server) ID() string { return s.ns.ID() }

// Shutdown closes the connections that Connect made, stops the server and returns when it has stopped. A second call does
// nothing.
func (s *Server) Shutdown() {
	s.mu.Lock()
	conns := s.conns
	first := !s.stopped
	s.stopped, s.conns = true, nil
	s.mu.Unlock()
	for _, c := range conns {
		c.Close()
	}
	if first {
		s.log.quiet.Store(true)
		s.ns.Shutdown()
	}
	s.ns.WaitForShutdown()
}
