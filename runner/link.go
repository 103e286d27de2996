package runner

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/runner/intake"
	"github.com/org-runink/runbus/runner/tunnel"
	"github.com/org-runink/runbus/schemas"
)

const (
	pingInterval   = 3 * time.Second // two unanswered end the link: the runner notices before the server does (DESIGN, Dispatch)
	maxPings       = 2
	connectTimeout = 10 * time.Second
)

// connect opens the one connection of this process. It returns while the first attempt may still fail: nats.go goes on. The end of
// ctx and a drain don't wait for that attempt: it ends by stopDialling.
func (a *Agent) connect(ctx context.Context, d nats.CustomDialer, stopDialling func()) error {
	attempt, attempted := context.WithCancel(ctx)
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-a.drainNow:
			stopDialling()
		case <-attempt.Done():
			if ctx.Err() != nil {
				stopDialling()
			}
		}
	})
	defer watch.Wait()
	defer attempted()
	var self atomic.Pointer[nats.Conn]
	var again redial
	dial := d
	if a.linked == nil { // else it is no dial, and has the TLS of its link
		dial = again.through(d)
	}
	nc, err := nats.Connect(a.servers(),
		nats.Name(schemas.ConnectName(a.ref.Runner, a.nonce)),
		a.cred.option(),
		nats.SetCustomDialer(dial),
		func(o *nats.Options) error { o.Secure, o.TLSConfig = a.cfg.TLS && a.linked == nil, a.tls; return nil },
		nats.CustomInboxPrefix(schemas.InboxPrefix(a.ref)),
		nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort(),
		nats.IgnoreDiscoveredServers(), nats.SkipHostLookup(), nats.ReconnectBufSize(-1),
		nats.WriteBufferSize(1), // what is published is written at once by its publisher, not after a turn of nats.go's flusher
		nats.Timeout(a.waits.connect), nats.PingInterval(pingInterval), nats.MaxPingsOutstanding(maxPings),
		nats.ConnectHandler(a.newLink), nats.ReconnectHandler(a.newLink),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) { a.warnUnreachable(err) }),
		nats.CustomReconnectDelay(func(attempt int) time.Duration {
			if a.linked != nil {
				return lookAgain
			}
			// nats.go tells ReconnectErrHandler of dials that fail, and of handshakes only the very first time.
			var err error
			if nc := self.Load(); nc != nil && attempt > 1 {
				if err = nc.LastError(); err != nil {
					a.warnUnreachable(err)
				}
			}
			refused := errors.Is(err, nats.ErrAuthorization) || errors.Is(err, nats.ErrAuthExpired)
			return again.pause(attempt, a.retry(attempt), refused, time.Now())
		}),
		nats.DisconnectErrHandler(func(nc *nats.Conn, err error) {
			if l := a.link.Load(); l != nil {
				l.end()
			}
			if nc.IsClosed() {
				return // ClosedHandler tells
			}
			if err == nil { // by this process, to reconnect
				a.log.Info("the link to the control plane is given up for a new one")
				return
			}
			a.log.Warn("the link to the control plane is down", "error", err)
		}),
		nats.ClosedHandler(func(nc *nats.Conn) {
			// nats.go gives up at errors that it doesn't know. This process can't mend that; whoever restarts it can.
			if err := nc.LastError(); err != nil {
				a.end(fmt.Errorf("the connection to the control plane was closed for good: %w", err))
			}
		}),
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) {
			subject := ""
			if sub != nil {
				subject = sub.Subject
			}
			a.log.Log(context.Background(), a.link.Load().grave(err), "bus error", "error", err, "subject", subject)
		}),
	)
	if err != nil {
		return configError("connect to %s: %v", a.addrsText(), err)
	}
	self.Store(nc)
	a.conn = bus.NewConn(nc)
	if a.linked != nil {
		a.linked.attach(nc)
	}
	return nil
}

// link is one established connection; its context ends with it.
type link struct {
	context.Context //nolint:containedctx // it is what the link is for: whoever waits for an answer over it stops with it
	end             context.CancelFunc
	greeted         atomic.Bool  // a hello was accepted on it
	denied          atomic.Int64 // subscriptions and messages that the server refused before
}

// grave is the level of an error that nats.go tells of beside its calls. A client whose credential has ended may do nothing on its next link
// but ask why: that its old subscriptions are refused there says less than the answer, and comes before it. The end of a permission
// is told by the end of the link.
func (l *link) grave(err error) slog.Level {
	switch {
	case errors.Is(err, nats.ErrAuthExpired):
		return slog.LevelDebug
	case errors.Is(err, nats.ErrPermissionViolation) && (l == nil || l.Err() != nil || !l.greeted.Load()):
		if l != nil {
			l.denied.Add(1)
		}
		return slog.LevelDebug
	}
	return slog.LevelWarn
}

// greet notes that a hello was accepted on the link, and returns how much was refused on it before: more than none is a fault.
func (l *link) greet() (denied int64) {
	l.greeted.Store(true)
	return l.denied.Load()
}

// newLink runs on the connection's callbacks, which come in order.
func (a *Agent) newLink(*nats.Conn) {
	l := new(link)
	l.Context, l.end = context.WithCancel(context.Background())
	if old := a.link.Swap(l); old != nil {
		old.end()
	}
	signal(a.linkUp)
}

func (a *Agent) warnUnreachable(err error) {
	if errors.Is(err, context.Canceled) || errors.Is(err, intake.ErrNoLink) {
		return // this process ends, or waits to be dialled
	}
	text, hint := explainLink(err)
	a.log.Warn("can't reach the control plane; trying again", "addr", a.addrsText(), "error", text, "hint", hint)
}

func (a *Agent) addrsText() string {
	out := make([]string, len(a.cfg.Addrs))
	for i, addr := range a.cfg.Addrs {
		_, out[i], _ = strings.Cut(addr, "://")
	}
	return strings.Join(out, ",")
}

func isTimeout(err error) bool {
	var timeout interface{ Timeout() bool }
	return errors.Is(err, nats.ErrTimeout) || errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout()
}

const nothingListens = "nothing listens there: is the control plane up, and is the port its NATS port?"

// explainLink says what an error of connecting means and what to do about it.
func explainLink(err error) (text, hint string) {
	text = err.Error()
	var proxied *tunnel.Error
	var unknown x509.UnknownAuthorityError
	switch {
	case errors.As(err, &proxied):
		return text, proxied.Hint
	case errors.Is(err, nats.ErrSecureConnWanted):
		return "the control plane offers no TLS at this address", "check the address; RUNNER_ENROLL_TLS=false would send in the clear and needs a control plane that allows it"
	case errors.As(err, &unknown):
		if unknown.Cert != nil {
			text += fmt.Sprintf(" (issued by %q)", unknown.Cert.Issuer)
		}
		return text, "set RUNNER_ENROLL_CA to the PEM file of the control plane's CA; core-runner doctor tells whether something in between shows a certificate of its own"
	case strings.Contains(text, "certificate is valid for"), strings.Contains(text, "not valid for any names"):
		return text, "dial the control plane under a name that is in its certificate"
	case strings.Contains(text, "expired or is not yet valid"):
		return text, "check the clock of this host, and the control plane's certificate"
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired):
		return text, "the control plane does not know this key, or can't decide now: check RUNNER_ENROLL_TOKEN"
	case strings.Contains(text, "first record does not look like a TLS handshake"):
		return text, "what listens there speaks no TLS: check the port"
	case strings.Contains(text, "invalid websocket connection"), strings.Contains(text, "malformed HTTP"):
		return text, "what listens there is no WebSocket of a control plane: check the port, or dial its NATS port as host:port"
	case strings.Contains(text, "protocol version not supported"):
		return text, "something that speaks no TLS 1.3 stands in between: TLS 1.3 is needed"
	case isTimeout(err), strings.Contains(text, "network is unreachable"), strings.Contains(text, "no route to host"):
		return text, "no answer: a firewall may drop the connection. Where only 443 is open use the control plane's wss:// address; where a proxy is the way out set HTTPS_PROXY"
	case errors.Is(err, nats.ErrNoServers): // what nats.go makes of a first attempt that is refused at each address
		return "connection refused", nothingListens
	case strings.Contains(text, "connection refused"):
		return text, nothingListens
	case strings.Contains(text, "no such host"):
		return text, "the name does not resolve on this host"
	}
	return text, ""
}
