package runner

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"slices"
	"time"

	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/runner/tunnel"
	"github.com/org-runink/runbus/schemas"
)

// Verdict is what a check came to.
type Verdict string

// The verdicts, best first. A check is skipped when one before it failed, so that nothing could be seen.
const (
	CheckOK   Verdict = "ok"
	CheckWarn Verdict = "warn"
	CheckFail Verdict = "fail"
	CheckSkip Verdict = "skip"
)

// Check is one thing that was looked at. It holds no secret.
type Check struct {
	// Name is one of configuration, dns, tcp, proxy, tls, token, clock, permissions, payload, rtt, state, ticket, journal, policy, files.
	Name string `json:"name"`
	// Address is the control plane's, host:port, in a check that is made for each.
	Address string  `json:"address,omitempty"`
	Verdict Verdict `json:"verdict"`
	Saw     string  `json:"saw"`
	// Todo is what to do about it; only of a warning or failure.
	Todo string `json:"todo,omitempty"`
}

// Diagnosis is all of them, in order.
type Diagnosis struct {
	Verdict Verdict `json:"verdict"` // fail if a check failed, else warn if one warns, else ok
	Checks  []Check `json:"checks"`
}

// DoctorOptions change how Diagnose looks.
type DoctorOptions struct {
	// Now is this host's clock. Nil means time.Now.
	Now func() time.Time
	// Patience bounds each step. Zero means 10 s.
	Patience time.Duration
	// NoTicket is why the ticket that Config.Ticket would be can't be used (identity.TakeTicket); nil also if none was given.
	NoTicket error
	// Begin and Done, if set, are told of each check as it is made.
	Begin func(name, address string)
	Done  func(Check)
}

// Diagnose looks at everything between a runner of cfg and its control plane, and at what the runner needs on this host (SPEC
// E11). It may run beside that runner: it connects as the same runner and takes neither its id nor its work. The control plane is
// told nothing but a probe; on this host it writes one file in the state folder and removes it. Each address is looked at.
func Diagnose(ctx context.Context, cfg Config, o DoctorOptions) Diagnosis {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Patience == 0 {
		o.Patience = 10 * time.Second
	}
	d := &doctor{o: o, cfg: cfg}
	if d.check("configuration", "", d.configuration) {
		for _, u := range d.urls {
			d.address(ctx, u)
		}
	}
	d.host()
	return d.diagnosis
}

// DiagnoseError is the diagnosis when not even the environment could be read.
func DiagnoseError(err error) Diagnosis {
	return Diagnosis{Verdict: CheckFail, Checks: []Check{{Name: "configuration", Verdict: CheckFail, Saw: err.Error(), Todo: todoConfiguration}}}
}

const todoConfiguration = "mend that setting (core-runner serve --help lists them)"

// doctor makes one diagnosis.
type doctor struct {
	o         DoctorOptions
	cfg       Config
	diagnosis Diagnosis

	urls   []*url.URL
	roots  *x509.CertPool
	tls    *tls.Config
	tunnel *tunnel.Dialer
	cred   *credential // nil: the token has not the form of one
	noCred error       // why
	id     string
	idFrom string
	folder *identity.Folder // of a runner that is dialled, once it was found to be whole
}

// finding is what a check saw. A zero verdict is CheckOK.
type finding struct {
	verdict   Verdict
	saw, todo string
}

func fail(saw, todo string) finding { return finding{CheckFail, saw, todo} }
func warn(saw, todo string) finding { return finding{CheckWarn, saw, todo} }

// refused fails with what core-runner serve says; todo is for an error that has no hint.
func refused(err error, todo string) finding {
	var said *schemas.Error
	if errors.As(err, &said) && said.Hint != "" {
		todo = said.Hint
	}
	return fail(err.Error(), todo)
}

func good(format string, args ...any) finding {
	return finding{saw: fmt.Sprintf(format, args...)}
}

// check makes one check and reports whether it did not fail.
func (d *doctor) check(name, address string, look func() finding) bool {
	if d.o.Begin != nil {
		d.o.Begin(name, address)
	}
	f := look()
	if f.verdict == "" {
		f.verdict = CheckOK
	}
	c := Check{Name: name, Address: address, Verdict: f.verdict, Saw: f.saw, Todo: f.todo}
	all := []Verdict{"", CheckOK, CheckSkip, CheckWarn, CheckFail}
	if c.Verdict != CheckSkip && slices.Index(all, c.Verdict) > slices.Index(all, d.diagnosis.Verdict) {
		d.diagnosis.Verdict = c.Verdict
	}
	d.diagnosis.Checks = append(d.diagnosis.Checks, c)
	if d.o.Done != nil {
		d.o.Done(c)
	}
	return c.Verdict != CheckFail
}

// skip notes checks that could not be made.
func (d *doctor) skip(address, why string, names ...string) {
	for _, name := range names {
		d.check(name, address, func() finding {
			if name == "token" && d.noCred != nil {
				return d.noToken() // it takes no connection to see that
			}
			return finding{CheckSkip, "not looked at: " + why, ""}
		})
	}
}

// dials reports whether the runner is meant to dial its control plane; else it is dialled.
func (d *doctor) dials() bool { return len(d.cfg.Addrs) > 0 || d.cfg.Token != "" || d.cfg.ID != "" }

// configuration reads everything that needs no network. What is wrong with the token is told where the token is looked at.
func (d *doctor) configuration() finding {
	bad := func(err error) finding { return refused(err, todoConfiguration) }
	whole := d.cfg
	if len(whole.Addrs) > 0 && whole.Token == "" {
		whole.Token = "none" // see above
	}
	err := cmp.Or(whole.plain(), whole.oneWay())
	switch {
	case d.dials() && d.o.NoTicket != nil:
		return bad(d.o.NoTicket)
	case err != nil:
		return bad(err)
	case d.cfg.Lifeline > 0:
		return bad(errors.New("RUNNER_LIFELINE is set: a managed runner belongs to the control plane that starts it, and has no doctor"))
	case !d.dials():
		return good("a runner that is dialled, at %s (RUNNER_ENROLL_ADDR is not set): there is no control plane to reach from here; `runink runner show NAME` has the last error of the one that dials it", whole.Listen)
	}
	for _, addr := range d.cfg.Addrs {
		text, err := d.cfg.serverURL(addr)
		if err != nil {
			return bad(err)
		}
		u, err := url.Parse(text)
		if err != nil {
			return bad(fmt.Errorf("RUNNER_ENROLL_ADDR: %q is no address", addr))
		}
		if len(d.urls) > 0 && webSocket(u) != webSocket(d.urls[0]) {
			return bad(errors.New("RUNNER_ENROLL_ADDR has WebSocket addresses (wss, ws) and others: use one kind"))
		}
		d.urls = append(d.urls, u)
	}
	if d.roots, err = d.cfg.roots(); err != nil {
		return bad(err)
	}
	if d.tunnel, err = d.cfg.tunnel(); err != nil {
		return bad(err)
	}
	cfg := d.cfg
	cfg.Addrs = []string{d.urls[0].String()}
	if d.tls, err = cfg.tlsConfig(); err != nil {
		return bad(err)
	}
	if err := d.runnerID(); err != nil {
		return bad(err)
	}
	if d.cfg.Token == "" {
		d.noCred = schemas.ErrTokenMissing()
	} else {
		d.cred, d.noCred = parseCredential(d.cfg.Token)
	}
	return good("%d address(es), runner id %q (%s)", len(d.urls), d.id, d.idFrom)
}

// runnerID is the id that the runner has or would take; with none yet, one that nobody has.
func (d *doctor) runnerID() error {
	d.id, d.idFrom = d.cfg.ID, "RUNNER_ID"
	if d.id == "" {
		dir := d.cfg.StateDir
		if dir == "" {
			dir = DefaultStateDir
		}
		id, err := readID(filepath.Join(dir, "runner-id"))
		d.id, d.idFrom = id, "kept in the state folder"
		if err != nil {
			d.id, d.idFrom = "doctor-"+schemas.NewID()[:12], "for this diagnosis: the runner makes its own at its first start"
		}
	}
	return outboundID(d.id)
}

func webSocket(u *url.URL) bool { return u.Scheme == "wss" || u.Scheme == "ws" }

// The checks of one address, in the order in which a connection comes about.
var (
	busChecks  = []string{"token", "clock", "permissions", "payload", "rtt"}
	linkChecks = append([]string{"tcp", "proxy", "tls"}, busChecks...)
)

// address looks at one address, from the name to the round trip, as far as it gets.
func (d *doctor) address(ctx context.Context, u *url.URL) {
	addr := u.Host
	route := d.tunnel.Route(addr)
	if !d.check("dns", addr, func() finding { return d.dns(ctx, route) }) {
		d.skip(addr, "the name does not resolve", linkChecks...)
		return
	}
	if !d.check("tcp", addr, func() finding { return d.tcp(ctx, route) }) {
		d.skip(addr, "no connection", linkChecks[1:]...)
		return
	}
	if !d.check("proxy", addr, func() finding { return d.proxy(ctx, route, addr) }) {
		d.skip(addr, "the proxy gives no tunnel", linkChecks[2:]...)
		return
	}
	if !d.check("tls", addr, func() finding { return d.secured(ctx, u) }) {
		d.skip(addr, "no safe connection", busChecks...)
		return
	}
	d.bus(ctx, u)
}

// step bounds one step.
func (d *doctor) step(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, d.o.Patience)
}

// dial is the way the runner itself takes. The connection ends with the step.
func (d *doctor) dial(ctx context.Context, addr string) (net.Conn, error) {
	c, err := d.tunnel.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	// A deadline, not an end: what is being read or written says that it took too long.
	return &boundConn{Conn: c, unbind: context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })}, nil
}
