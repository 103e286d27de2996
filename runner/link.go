package runner

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
)

const (
	pingInterval   = 3 * time.Second // two unanswered end the link: the runner notices before the server does (DESIGN, Dispatch)
	maxPings       = 2
	connectTimeout = 10 * time.Second
)

// connect opens the one connection of this process. It returns while the first attempt may still fail: nats.go goes on.
func (a *Agent) connect() error {
	var self atomic.Pointer[nats.Conn]
	nc, err := nats.Connect(strings.Join(a.cfg.Addrs, ","),
		nats.Name(schemas.ConnectName(a.ref.Runner, a.nonce)),
		a.cred.option(),
		func(o *nats.Options) error { o.Secure, o.TLSConfig = a.cfg.TLS, a.tls; return nil },
		nats.CustomInboxPrefix(schemas.InboxPrefix(a.ref)),
		nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.IgnoreAuthErrorAbort(),
		nats.IgnoreDiscoveredServers(), nats.SkipHostLookup(), nats.ReconnectBufSize(-1),
		nats.Timeout(connectTimeout), nats.PingInterval(pingInterval), nats.MaxPingsOutstanding(maxPings),
		nats.ConnectHandler(a.newLink), nats.ReconnectHandler(a.newLink),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) { a.warnUnreachable(err) }),
		nats.CustomReconnectDelay(func(attempt int) time.Duration {
			// nats.go tells ReconnectErrHandler of dials that fail, and of handshakes only the very first time.
			if nc := self.Load(); nc != nil && attempt > 1 {
				if err := nc.LastError(); err != nil {
					a.warnUnreachable(err)
				}
			}
			return a.retry(attempt)
		}),
		nats.DisconnectErrHandler(func(nc *nats.Conn, err error) {
			if l := a.link.Load(); l != nil {
				l.end()
			}
			if nc.IsClosed() {
				return // ClosedHandler tells
			}
			if err == nil {
				err = errors.New("closed") // to reconnect
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
			a.log.Warn("bus error", "error", err, "subject", subject)
		}),
	)
	if err != nil {
		return configError("connect to %s: %v", a.addrsText(), err)
	}
	self.Store(nc)
	a.conn = bus.NewConn(nc)
	return nil
}

// link is one established connection; its context ends with it.
type link struct {
	context.Context //nolint:containedctx // it is what the link is for: whoever waits for an answer over it stops with it
	end             context.CancelFunc
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

// explainLink says what an error of connecting means and what to do about it.
func explainLink(err error) (text, hint string) {
	text = err.Error()
	switch {
	case errors.Is(err, nats.ErrSecureConnWanted):
		return "the control plane offers no TLS at this address", "check the address; RUNNER_ENROLL_TLS=false would send in the clear and needs a control plane that allows it"
	case strings.Contains(text, "certificate signed by unknown authority"):
		return text, "set RUNNER_ENROLL_CA to the PEM file of the control plane's CA"
	case strings.Contains(text, "certificate is valid for"), strings.Contains(text, "not valid for any names"):
		return text, "dial the control plane under a name that is in its certificate"
	case strings.Contains(text, "expired or is not yet valid"):
		return text, "check the clock of this host, and the control plane's certificate"
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired):
		return text, "the control plane does not know this key, or can't decide now: check RUNNER_ENROLL_TOKEN"
	case strings.Contains(text, "connection refused"):
		return text, "nothing listens there: is the control plane up, and is the port its NATS port?"
	case strings.Contains(text, "no such host"):
		return text, "the name does not resolve on this host"
	}
	return text, ""
}
