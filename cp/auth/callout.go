package auth

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
)

const (
	calloutSubject = "$SYS.REQ.USER.AUTH"
	calloutQueue   = "runbus-callout"
	// calloutReplies is where servers wait for answers. A reply subject is foreign text: nothing is published elsewhere.
	calloutReplies = "$SYS._INBOX."
	xkeyHeader     = "Nats-Server-Xkey"
	// answerWithin is the server's patience by default (authorization.timeout).
	answerWithin = 1800 * time.Millisecond
	// calloutBacklog is how many requests may wait for a worker.
	calloutBacklog = 4096
	// calloutBusy is how many of them are enough: new connections had better wait before they shake hands.
	calloutBusy = 128
)

// Subjects are what a user may publish and subscribe: allow-lists, neither may be empty.
type Subjects struct{ Publish, Subscribe []string }

// CalloutConfig is what ServeCallout needs. All fields but Link, Patience, JailTime, Log and Ready are required.
type CalloutConfig struct {
	Conn *nats.Conn // in account AUTH
	Sys  *nats.Conn // in account SYS, to cut the connections of a revoked key
	Jail *bus.Conn  // in account JAIL, to tell refused clients why
	// Issuer signs the answers, XKey opens the requests and seals the answers.
	Issuer, XKey nkeys.KeyPair
	// OpsPublic and OpsSysPublic are the public nkeys of ops, and Ops and OpsSys what they may do in OPS and SYS.
	OpsPublic, OpsSysPublic string
	Ops, OpsSys             Subjects
	// Bound is the public key that holds a runner's id, if one does. It answers from memory.
	Bound func(ref schemas.RunnerRef) (publicKey string, ok bool)
	// Link lets dialled runners in. The zero value refuses them.
	Link LinkConfig
	// Patience is how long the servers wait for an answer (authorization.timeout). Zero means 1.8 s. An older request is dropped: its
	// client has gone.
	Patience time.Duration
	// JailTime is how long a refused client may stay in JAIL, to be told why. Zero means 10 s; whole seconds count.
	JailTime time.Duration
	// Ready, if not nil, is called once when requests are being answered.
	Ready func()
	Log   *slog.Logger // nil: the log of Auth
}

func (c CalloutConfig) check() error {
	if c.Conn == nil || c.Sys == nil || c.Jail == nil || c.Issuer == nil || c.XKey == nil || c.Bound == nil {
		return errors.New("callout: Conn, Sys, Jail, Issuer, XKey and Bound are required")
	}
	if !nkeys.IsValidPublicUserKey(c.OpsPublic) || !nkeys.IsValidPublicUserKey(c.OpsSysPublic) {
		return errors.New("callout: OpsPublic and OpsSysPublic must be public user nkeys")
	}
	for _, s := range []Subjects{c.Ops, c.OpsSys} {
		// The server takes an empty list for "everything".
		if len(s.Publish) == 0 || len(s.Subscribe) == 0 {
			return errors.New("callout: Ops and OpsSys need a publish and a subscribe list each")
		}
	}
	return nil
}

// withDefaults is c with what may be left out.
func (c CalloutConfig) withDefaults(log *slog.Logger) CalloutConfig {
	c.Patience, c.JailTime = cmp.Or(c.Patience, answerWithin), cmp.Or(c.JailTime, jailTime)
	if c.Log == nil {
		c.Log = log
	}
	return c
}

// callout answers authorization requests of one replica.
type callout struct {
	a     *Auth
	c     CalloutConfig
	log   *slog.Logger
	boxes *boxes
	signs *issuer
	quiet *rate.Limiter // refusals that are logged: anybody can cause them
	links *links
	notes *notes

	requests chan request
	dropped  atomic.Uint64
}

// request is one message of a server with the time at which it came in.
type request struct {
	msg *nats.Msg
	at  time.Time
}

// ServeCallout answers the servers' authorization requests from memory until ctx ends, and blocks. Beside it, it answers
// the hello of clients in JAIL with the reason they are there, and cuts the connections of revoked keys. It returns nil
// when ctx ends, and an error when one of its connections is closed before. Call it last at a start: until then every
// client is refused, and comes back.
func (a *Auth) ServeCallout(ctx context.Context, c CalloutConfig) error {
	if err := c.check(); err != nil {
		return err
	}
	c = c.withDefaults(a.log)
	boxes, err := newBoxes(c.XKey)
	if err != nil {
		return err
	}
	signs, err := newIssuer(c.Issuer)
	if err != nil {
		return err
	}
	s := &callout{
		a: a, c: c, log: c.Log, boxes: boxes, signs: signs, quiet: rate.NewLimiter(10, 50), links: newLinks(), notes: newNotes(a.now),
		requests: make(chan request, calloutBacklog),
	}
	g, ctx := errgroup.WithContext(ctx)
	kick := newKicker(s)
	a.OnKeyRevoked(kick.revoked)
	if c.Link.OnEnded != nil {
		c.Link.OnEnded(kick.leavesEnded)
	}
	defer kick.stop()

	jailed, err := c.Jail.QueueSubscribe(schemas.AllHellos, jailQueue, s.answerJailed)
	if err != nil {
		return fmt.Errorf("serve the jail: %w", err)
	}
	defer unsubscribe(jailed)
	if err := flush(ctx, c.Jail.NATS()); err != nil {
		return fmt.Errorf("serve the jail: %w", err)
	}
	asked, err := c.Conn.QueueSubscribe(calloutSubject, calloutQueue, s.enqueue)
	if err != nil {
		return fmt.Errorf("serve the callout: %w", err)
	}
	defer unsubscribe(asked)
	if err := asked.SetPendingLimits(-1, -1); err != nil { // enqueue never blocks
		return fmt.Errorf("serve the callout: %w", err)
	}
	if err := flush(ctx, c.Conn); err != nil {
		return fmt.Errorf("serve the callout: %w", err)
	}

	for range max(4, 2*runtime.GOMAXPROCS(0)) {
		g.Go(func() error { return s.work(ctx) })
	}
	g.Go(func() error { return kick.run(ctx) })
	for name, nc := range map[string]*nats.Conn{"callout": c.Conn, "system": c.Sys, "jail": c.Jail.NATS()} {
		g.Go(func() error { return watchClosed(ctx, name, nc) })
	}
	if c.Ready != nil {
		c.Ready()
	}
	return g.Wait()
}

// CalloutBusy reports whether so many clients wait for the callout that new ones had better wait before they connect. It answers at
// once, and from any goroutine.
func (a *Auth) CalloutBusy() bool { return a.asking.Load() >= calloutBusy }

// enqueue takes a request over from the connection's reader. One that finds the backlog full is dropped: its client is
// refused by the server's timeout, and comes back.
func (s *callout) enqueue(msg *nats.Msg) {
	select {
	case s.requests <- request{msg: msg, at: time.Now()}:
		s.a.asking.Add(1)
	default:
		if n := s.dropped.Add(1); n%1000 == 1 {
			s.log.Warn("authorization requests dropped: too many at once", "dropped", n)
		}
	}
}

func (s *callout) work(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case r := <-s.requests:
			if time.Since(r.at) < s.c.Patience {
				s.answer(r.msg)
			}
			s.a.asking.Add(-1)
		}
	}
}

// answer decides one request. One that can't be read is dropped, since there is nobody to answer.
func (s *callout) answer(msg *nats.Msg) {
	if !isServerInbox(msg.Reply) {
		s.logRefusal("authorization request with a foreign reply subject", "reply", clip(msg.Reply))
		return
	}
	serverXKey := msg.Header.Get(xkeyHeader)
	req, err := openRequest(s.boxes, serverXKey, msg.Data)
	if err != nil {
		s.logRefusal("unreadable authorization request", "error", err)
		return
	}
	v := s.decide(req)
	body, err := s.response(req, v)
	if err != nil {
		s.log.Error("authorization answer", "error", err)
		return
	}
	sealed, err := s.boxes.seal([]byte(body), serverXKey)
	if err != nil {
		s.log.Error("authorization answer", "error", err)
		return
	}
	s.report(req, v)
	if err := s.c.Conn.Publish(msg.Reply, sealed); err != nil {
		s.log.Error("authorization answer", "error", err)
	}
}

// isServerInbox accepts a reply subject in which a server waits: calloutReplies and one or more tokens, no wildcard.
func isServerInbox(reply string) bool {
	rest, ok := strings.CutPrefix(reply, calloutReplies)
	if !ok {
		return false
	}
	for token := range strings.SplitSeq(rest, ".") {
		if token == "" || strings.ContainsAny(token, "*> \t\r\n") {
			return false
		}
	}
	return true
}

// response is the signed answer of a verdict.
func (s *callout) response(req *jwt.AuthorizationRequestClaims, v verdict) (string, error) {
	answer := jwt.NewAuthorizationResponseClaims(req.UserNkey)
	answer.Audience = req.Server.ID
	if v.refused != "" {
		answer.Error = v.refused
		return answer.Encode(s.signs)
	}
	user, err := v.claims(req.UserNkey)
	if err != nil {
		return "", err
	}
	if answer.Jwt, err = user.Encode(s.signs); err != nil {
		return "", err
	}
	return answer.Encode(s.signs)
}

// report logs a verdict, notes a refusal of a credential that proved itself in the audit log, and remembers the link of
// an admitted key.
func (s *callout) report(req *jwt.AuthorizationRequestClaims, v verdict) {
	info := req.ClientInformation
	switch {
	case v.refused != "":
		s.logRefusal("client refused", "reason", v.refused, "host", info.Host, "name", clip(info.Name))
	case v.place == placeJail:
		s.logRefusal("client jailed", "reason", v.reason.Error(), "tenant", v.tenant, "runner", v.runner, "host", info.Host)
		s.noteJailed(v)
	case v.place == placeRun:
		if !strings.HasPrefix(v.key, leafTag) { // those of leaves a scan finds: there is a new leaf each day
			s.links.add(v.key, link{server: req.Server.ID, client: info.ID})
		}
		s.log.Debug("runner admitted", "tenant", v.tenant, "runner", v.runner, "host", info.Host)
	default:
		s.log.Info("operator of the bus admitted", "account", v.place.account(), "host", info.Host)
	}
}

func (s *callout) logRefusal(text string, kv ...any) {
	if s.quiet.Allow() {
		s.log.Warn(text, kv...)
	}
}

// watchClosed returns an error when nc is closed while ctx lives.
func watchClosed(ctx context.Context, name string, nc *nats.Conn) error {
	closed := nc.StatusChanged(nats.CLOSED)
	defer nc.RemoveStatusListener(closed)
	if nc.IsClosed() && ctx.Err() == nil {
		return fmt.Errorf("the %s connection is closed", name)
	}
	select {
	case <-ctx.Done():
		return nil
	case <-closed:
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("the %s connection was closed", name)
	}
}

func unsubscribe(s *nats.Subscription) { _ = s.Unsubscribe() } // fails only on a closed connection

// flush waits until the server has taken what was sent. It is part of a start, which fails when it does, and so as patient as that.
func flush(ctx context.Context, nc *nats.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return nc.FlushWithContext(ctx)
}
