package enrol

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/cp/egress"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// DiallerDeps are the parts that a Dialler stands on. All but Log, Now and the times are required.
type DiallerDeps struct {
	Roster *roster.Roster
	Store  *jetstream.Store // the leases
	CA     *CA
	Tokens *LinkTokens
	// Presence is a connection in account SEC: replicas hear each other there.
	Presence *nats.Conn
	// Replica is the boot of this replica, ServerID its NATS server, and Server a new connection to that.
	Replica, ServerID string
	Server            func() (net.Conn, error)
	// Exchange carries out one enrolment or renewal of an expired leaf over a connection that was made with config and whose ALPN is
	// link.ProtoEnrol (Enroller.Exchange).
	Exchange func(ctx context.Context, conn *tls.Conn, config *tls.Config, r roster.Runner) error
	// Order sends an order to the session that a runner has and waits for the reply.
	Order func(ctx context.Context, ref schemas.RunnerRef, order *runbusv1.RunnerControl) (*runbusv1.RunnerControlReply, error)
	// Handover says that the link of a runner is about to be replaced, so that work waits for the new one. May be nil.
	Handover func(ref schemas.RunnerRef, within time.Duration)
	// Rules are where runners are dialled.
	Rules egress.Rules
	Log   *slog.Logger     // nil: slog.Default()
	Now   func() time.Time // nil: time.Now
	// DialWithin bounds connection and handshake, each. Zero means 5 s.
	DialWithin time.Duration
	// FirstRetry and SlowestRetry pace attempts that fail. Zero means 1 s and 30 s (SPEC C7).
	FirstRetry, SlowestRetry time.Duration
}

// LinkState is what this replica knows of its link to a runner.
type LinkState struct {
	Connected bool       `json:"connected"`
	Since     *time.Time `json:"since,omitempty"`     // of the link
	PeerAddr  string     `json:"peerAddr,omitempty"`  // of the link
	LastError string     `json:"lastError,omitempty"` // of the last attempt, until one succeeds
	NextTry   *time.Time `json:"nextTry,omitempty"`   // while it is being waited for
	// Health is the runner's last claim about its process, and HealthAt when it made it (SPEC C10).
	Health   *runbusv1.RunnerHealth `json:"-"`
	HealthAt *time.Time             `json:"-"`
}

// Dialler dials every dialled runner that is this replica's to dial, enrols those that are to be enrolled, and keeps one link to each of
// the others (SPEC C1, C7, C11). Safe for concurrent use.
type Dialler struct {
	d         DiallerDeps
	leases    *jetstream.Table[Lease]
	leaseView *jetstream.View[Lease]
	replicas  *replicas
	subs      []*nats.Subscription

	changed chan struct{} // the roster has changed

	mu      sync.Mutex
	tenders map[string]*tender // by runner id
	ended   []func()           // told when a leaf may have ended
}

// NewDialler makes one. It hears of the other replicas and of changes from now on, and dials from Run on.
func NewDialler(ctx context.Context, d DiallerDeps) (*Dialler, error) {
	if d.Roster == nil || d.Store == nil || d.CA == nil || d.Tokens == nil || d.Presence == nil || d.Server == nil || d.Exchange == nil || d.Order == nil {
		return nil, errors.New("dialler: Roster, Store, CA, Tokens, Presence, Server, Exchange and Order are required")
	}
	d.Log = cmp.Or(d.Log, slog.Default())
	if d.Now == nil {
		d.Now = time.Now
	}
	d.DialWithin = cmp.Or(d.DialWithin, 5*time.Second)
	d.FirstRetry = cmp.Or(d.FirstRetry, time.Second)
	d.SlowestRetry = cmp.Or(d.SlowestRetry, 30*time.Second)
	x := &Dialler{
		d: d, leases: jetstream.TableOf[Lease](d.Store, jetstream.Leases), replicas: newReplicas(d.Presence, d.Replica, d.Now),
		changed: make(chan struct{}, 1), tenders: make(map[string]*tender),
	}
	var err error
	if x.leaseView, err = x.leases.Follow(ctx, func(row jetstream.Row[Lease]) { x.wake(row.Key) }); err != nil {
		return nil, fmt.Errorf("dialler: %w", err)
	}
	heard, err := x.replicas.follow()
	if err == nil {
		x.subs = append(x.subs, heard)
		var asked *nats.Subscription
		if asked, err = d.Presence.Subscribe(connectSubject, func(msg *nats.Msg) {
			if by, id, _ := strings.Cut(string(msg.Data), " "); by != d.Replica {
				x.dialNow(id)
			}
		}); err == nil {
			x.subs = append(x.subs, asked)
		}
	}
	if err != nil {
		x.Close()
		return nil, fmt.Errorf("dialler: %w", err)
	}
	d.Roster.OnChange(x.rosterChanged)
	return x, nil
}

// Close stops what NewDialler began. Call it after Run has returned.
func (d *Dialler) Close() {
	for _, sub := range d.subs {
		_ = sub.Unsubscribe() // fails only on a closed connection
	}
	d.leaseView.Close()
}

// Run dials until ctx ends, then ends all links and returns nil.
func (d *Dialler) Run(ctx context.Context) error {
	var tending sync.WaitGroup
	defer tending.Wait()
	beacon := time.NewTicker(beaconEvery)
	defer beacon.Stop()
	for again := true; ; {
		if again {
			err := d.tendAll(ctx, &tending)
			if again = err != nil; again {
				d.d.Log.Debug("the runners to dial could not be read", "error", err) // whether they can is a condition of /readyz
			}
		}
		if err := d.replicas.call(); err != nil && ctx.Err() == nil {
			d.d.Log.Warn("other replicas don't hear this one", "error", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-d.changed:
			again = true
		case <-beacon.C:
		}
	}
}

// tendAll starts a task for each runner that has none.
func (d *Dialler) tendAll(ctx context.Context, tending *sync.WaitGroup) error {
	runners, err := d.d.Roster.All()
	if err != nil {
		return err
	}
	for _, r := range runners {
		if r.State == roster.Revoked {
			continue
		}
		d.mu.Lock()
		_, tended := d.tenders[r.ID]
		if !tended {
			t := newTender(d, r.ID)
			d.tenders[r.ID] = t
			tending.Go(func() {
				t.run(ctx)
				d.mu.Lock()
				delete(d.tenders, r.ID)
				d.mu.Unlock()
			})
		}
		d.mu.Unlock()
	}
	return nil
}

func (d *Dialler) rosterChanged(r roster.Runner) {
	signal(d.changed)
	if t := d.tender(r.ID); t != nil {
		if r.State == roster.Revoked {
			t.revoke()
		}
		signal(t.wake)
	}
	if r.State == "" || r.State == roster.Pending {
		return
	}
	d.mu.Lock()
	tell := d.ended
	d.mu.Unlock()
	for _, fn := range tell {
		fn()
	}
}

// OnLeafEnded has fn called when the leaf of some runner may have ended: it was revoked, or replaced. fn must not block.
func (d *Dialler) OnLeafEnded(fn func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ended = append(d.ended, fn)
}

// Connect has the runner dialled at once, by whichever replica does (SPEC C7).
func (d *Dialler) Connect(id string) {
	d.dialNow(id)
	if err := d.d.Presence.Publish(connectSubject, []byte(d.d.Replica+" "+id)); err != nil {
		d.d.Log.Warn("the other replicas were not asked to dial", "runner", id, "error", err)
	}
}

// Redial makes a fresh link beside the one that this replica has to the runner, and gives that one up when the runner has taken the
// new one: so the next leaf comes into use (SPEC C8). It does nothing without a link.
func (d *Dialler) Redial(id string) {
	if t := d.tender(id); t != nil {
		t.askAnother()
	}
}

// Linked reports whether this replica has the link to a runner and is about no other one: a renewal that began beside that would leave a
// key at the runner, since its leaf is being promoted already.
func (d *Dialler) Linked(id string) bool {
	t := d.tender(id)
	return t != nil && t.settled()
}

// Link is what this replica knows of its link to a runner.
func (d *Dialler) Link(id string) LinkState {
	if t := d.tender(id); t != nil {
		return t.snapshot()
	}
	return LinkState{}
}

func (d *Dialler) tender(id string) *tender {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.tenders[id]
}

func (d *Dialler) wake(id string) {
	if t := d.tender(id); t != nil {
		signal(t.wake)
	}
}

func (d *Dialler) dialNow(id string) {
	if t := d.tender(id); t != nil {
		signal(t.now)
	}
}

// mine reports whether this replica should dial a runner.
func (d *Dialler) mine(id string) bool {
	return !d.heldElsewhere(id) && d.replicas.owner(id) == d.d.Replica
}

// retryDelay is the pause after that many failures: doubling, from half of it to the whole, so that many runners don't come at once.
func (d *Dialler) retryDelay(failures int) time.Duration {
	most := min(d.d.FirstRetry<<min(max(failures, 1)-1, 10), d.d.SlowestRetry)
	return most/2 + rand.N(most/2+1) //nolint:gosec // spreads load, keeps no secret
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
