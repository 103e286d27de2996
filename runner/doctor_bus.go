package runner

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/internal/natsdial"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// From where on what the doctor measures is worth a word.
const (
	skewWarn = 5 * time.Second
	skewFail = 5 * time.Minute // certificates and the sessions of sources begin to fail
	rttWarn  = 250 * time.Millisecond
	rttPings = 10
)

// patient is one connection of the doctor's, as the runner that it looks at.
type patient struct {
	*bus.Conn
	d        *doctor
	ref      schemas.RunnerRef
	nonce    string
	refused  chan error // asynchronous errors of the connection
	answer   *runbusv1.EnrollmentAccepted
	answered time.Time // by this host's clock, halfway of the request
	took     time.Duration
}

// bus connects and looks at everything that the control plane decides.
func (d *doctor) bus(ctx context.Context, u *url.URL) {
	addr := u.Host
	var p *patient
	accepted := d.check("token", addr, func() (f finding) {
		p, f = d.token(ctx, u)
		return f
	})
	if p == nil {
		d.skip(addr, "not connected", busChecks[1:]...)
		return
	}
	defer p.NATS().Close()
	if p.answer.GetServerTime() == nil {
		d.skip(addr, "the control plane did not tell its time", "clock")
	} else {
		d.check("clock", addr, p.clock)
	}
	if !accepted {
		d.skip(addr, "the credential is not accepted", busChecks[2:]...)
		return
	}
	d.check("permissions", addr, func() finding { return p.permissions(ctx) })
	d.check("payload", addr, p.payload)
	d.check("rtt", addr, p.roundTrip)
}

const todoMint = "set RUNNER_ENROLL_TOKEN to a service-account token (runink key create NAME prints one)"

// noToken is what is wrong with the token's form.
func (d *doctor) noToken() finding {
	return fail(strings.TrimPrefix(d.noCred.Error(), "❌ "), todoMint)
}

// token connects with the credential and asks whether the runner would be enrolled. The connection is nil if there is none.
func (d *doctor) token(ctx context.Context, u *url.URL) (*patient, finding) {
	if d.noCred != nil {
		return nil, d.noToken()
	}
	p := &patient{d: d, ref: schemas.RunnerRef{Tenant: d.cred.tenant, Runner: d.id}, nonce: schemas.NewID(), refused: make(chan error, 64)}
	nc, err := natsdial.Connect(d.o.Patience, u.String(),
		nats.Name(schemas.ConnectName(p.ref.Runner, p.nonce)), d.cred.option(),
		func(o *nats.Options) error { o.Secure, o.TLSConfig = d.cfg.TLS, d.tls; return nil },
		nats.SetCustomDialer(&dialer{ctx, d.tunnel, d.o.Patience, nil}), nats.Timeout(d.o.Patience),
		nats.CustomInboxPrefix(schemas.InboxPrefix(p.ref)),
		nats.NoReconnect(), nats.IgnoreDiscoveredServers(), nats.SkipHostLookup(),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			select {
			case p.refused <- err:
			default:
			}
		}))
	switch {
	case errors.Is(err, nats.ErrAuthorization):
		return nil, fail(d.cred.describe()+" is refused: "+err.Error(),
			"the control plane does not know it, or can't decide now: was it minted there, and is its /readyz ready (identities, callout)? If so, "+todoMint)
	case err != nil:
		text, todo := explainLink(err)
		return nil, fail("no connection: "+text, todo)
	}
	p.Conn = bus.NewConn(nc)
	return p, p.probe(ctx)
}

// probe asks whether a hello would be accepted; it is none.
func (p *patient) probe(ctx context.Context) finding {
	ctx, cancel := p.d.step(ctx)
	defer cancel()
	h := &runbusv1.RunnerHello{
		RunnerId: p.ref.Runner, Name: "core-runner doctor", Version: BuildVersion(), ProcessNonce: p.nonce,
		Pid: int64(os.Getpid()), Probe: true,
	}
	cred := p.d.cred
	if err := cred.sign(p.ref, h); err != nil {
		return fail(err.Error(), "")
	}
	p.answer = new(runbusv1.EnrollmentAccepted)
	sent, began := p.d.o.Now(), time.Now()
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		err = p.Request(ctx, schemas.HelloSubject(p.ref), h, p.answer)
	}()
	select {
	case <-done:
	case why := <-p.refused: // no answer will come
		cancel()
		<-done
		err = why
	}
	p.took = time.Since(began)
	p.answered = sent.Add(p.took / 2)
	if errors.Is(err, bus.ErrNoResponders) {
		return fail("connected, and no control plane answers hellos there", "is a control plane running on that bus, and is its /readyz ready?")
	}
	if err != nil {
		return fail("connected, and the question whether the runner may enrol was not answered: "+err.Error(), "is the control plane's /readyz ready? Look at its log")
	}
	if detail := p.answer.GetError(); detail != nil {
		if schemas.Code(detail.GetCode()) == schemas.CodeInvalid && strings.Contains(detail.GetMessage(), "sealing key") {
			return warn(cred.describe()+" is let in; the control plane is older than this doctor and can't be asked whether the runner may enrol", "start the runner to see")
		}
		todo := detail.GetHint()
		if todo == "" {
			todo = "see the control plane's log"
		}
		return fail(cred.describe()+" is refused: "+detail.GetMessage(), todo)
	}
	return good("%s is accepted; the runner enrols as %s", cred.describe(), p.answer.GetRunnerId())
}

// describe names the credential without a part of it.
func (c *credential) describe() string {
	if c.session != "" {
		return "the session token of a person"
	}
	return fmt.Sprintf("the service-account token of tenant %q (public key %s)", c.tenant, c.public)
}

// clock compares this host's clock with the control plane's.
func (p *patient) clock() finding {
	skew := p.answered.Sub(p.answer.GetServerTime().AsTime())
	saw := fmt.Sprintf("this host's clock is %s %s the control plane's (give or take %s)", skew.Abs().Round(10*time.Millisecond),
		map[bool]string{true: "behind", false: "ahead of"}[skew < 0], (p.took / 2).Round(time.Millisecond))
	const todo = "set the clock, and keep it by NTP (timedatectl set-ntp true)"
	switch least := skew.Abs() - p.took/2; { // of an answer that took long nobody knows better
	case least > skewFail:
		return fail(saw, todo+": certificates and logins of sources fail")
	case least > skewWarn:
		return warn(saw, todo)
	}
	return good("%s", saw)
}

// permissions subscribes what a runner subscribes, under a session that nobody has, and tries what must be refused.
func (p *patient) permissions(ctx context.Context) finding {
	ctx, cancel := p.d.step(ctx)
	defer cancel()
	nobody, before := schemas.NewID(), p.NATS().LastError()
	for _, subject := range []string{
		schemas.WorkSubject(p.ref, nobody), schemas.ControlSubject(p.ref, nobody), schemas.CreditSubject(p.ref, nobody),
		schemas.InboxPrefix(p.ref) + "." + nobody,
	} {
		sub, err := p.NATS().SubscribeSync(subject)
		if err == nil {
			err = p.NATS().FlushWithContext(ctx)
		}
		if err != nil {
			return fail(err.Error(), "")
		}
		_ = sub.Unsubscribe()
	}
	if err := p.NATS().LastError(); err != before { // it is another one
		return fail("the runner's own subjects are refused: "+err.Error(), "the control plane's callout and its runners are of different versions: update both")
	}
	other := schemas.RunnerRef{Tenant: p.ref.Tenant, Runner: "not-" + nobody[:12]}
	if f := p.mustBeRefused(ctx, "publish to another runner's subject", func() error {
		return p.NATS().Publish(schemas.ReplySubject(other, nobody, nobody), nil) // where nobody listens
	}); f.verdict != "" {
		return f
	}
	if f := p.mustBeRefused(ctx, "subscribe another runner's work", func() error {
		_, err := p.NATS().SubscribeSync(schemas.WorkSubject(other, nobody))
		return err
	}); f.verdict != "" {
		return f
	}
	return good("its own subjects are open, another runner's are not")
}

// mustBeRefused does what the server has to answer with a permissions violation. That comes before the answer to a flush.
func (p *patient) mustBeRefused(ctx context.Context, what string, do func() error) finding {
	before := p.NATS().LastError()
	if err := errors.Join(do(), p.NATS().FlushWithContext(ctx)); err != nil {
		return fail(err.Error(), "")
	}
	switch err := p.NATS().LastError(); {
	case err == before: // no other one
	case errors.Is(err, nats.ErrPermissionViolation):
		return finding{}
	default:
		return fail(what+": "+err.Error(), "")
	}
	return fail("this runner may "+what, "the permissions of the control plane's callout are not in force: is its NATS server configured as the control plane's own one is (accounts, auth_callout)?")
}

// payload compares the server's limit with what results need.
func (p *patient) payload() finding {
	if limit := p.NATS().MaxPayload(); limit < bus.MaxPayload {
		return fail(fmt.Sprintf("the bus takes messages of %d bytes at most; results need %d", limit, bus.MaxPayload), "set max_payload: 1MB in the NATS server's configuration")
	}
	return good("messages of %d bytes", p.NATS().MaxPayload())
}

// roundTrip is the median of some pings.
func (p *patient) roundTrip() finding {
	var all []time.Duration
	for range rttPings {
		rtt, err := p.NATS().RTT()
		if err != nil {
			return fail("a ping was not answered: "+err.Error(), "the connection breaks: look for a firewall or proxy that ends connections")
		}
		all = append(all, rtt)
	}
	slices.Sort(all)
	median := all[len(all)/2]
	saw := fmt.Sprintf("median %s of %d pings, slowest %s", median.Round(10*time.Microsecond), len(all), all[len(all)-1].Round(10*time.Microsecond))
	if median > rttWarn {
		return warn(saw, "each fetch takes some round trips, and results wait for acknowledgements: use a control plane nearer to this host")
	}
	return good("%s", saw)
}
