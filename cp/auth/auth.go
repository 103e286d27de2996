// Package auth knows who may do what: tenants, people with their roles and sessions, service-account keys, and the
// callout that lets a connection into an account of the NATS server (SPEC E4, E5, "Interfaces that are fixed now").
//
// All of it is decided by compare-and-set in the bucket runbus_identities and answered from a watched view of it in
// memory. A change is durable in the audit log before it is acknowledged. A secret (a seed, a session token) leaves this
// package once, as the return value of the call that made it, and is stored nowhere: of a key there is the public half, of
// a session the SHA-256 of its token.
package auth

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const (
	// KeyLife is how long a service-account key is valid (SPEC E4).
	KeyLife = 365 * 24 * time.Hour
	// SessionLife is how long a person's session token is valid.
	SessionLife = 90 * 24 * time.Hour
	// FileSessionLife is how long a token in a token file (EnsureOperator, EnsureTenantAdmin) is valid. It is made again
	// at a start that finds less than FileSessionRenew of it left.
	FileSessionLife = 365 * 24 * time.Hour
	// FileSessionRenew is the rest of a token file's life below which a start makes a new one.
	FileSessionRenew = 30 * 24 * time.Hour
	// StaleAfter is how long the view of the identities is trusted without a confirmation by the bucket's leader: after
	// it no new runner is let in.
	StaleAfter = 30 * time.Second
	// OwnerName is the name of a tenant's first admin.
	OwnerName = "owner"

	// maxLiveKeys and maxPeople bound a tenant: its records are held in memory by every replica.
	maxLiveKeys = 1000
	maxPeople   = 1000
	// maxKeyHistory is how many ended keys of one name are remembered, to tell their bearers why they are refused.
	maxKeyHistory = 100
	// casAttempts bounds the retries of a change that lost against another writer.
	casAttempts = 5
)

// Role is what a person may do.
type Role string

// The roles.
const (
	RoleReader   Role = "READER"    // lists
	RoleWriter   Role = "WRITER"    // also runs fetches
	RoleOrgAdmin Role = "ORG_ADMIN" // everything in its tenant
	RoleOperator Role = "OPERATOR"  // the platform's operator: creates tenants, belongs to none
)

// Principal is who an authenticated request acts for.
type Principal struct {
	Tenant    string // empty for the operator
	Name      string
	Role      Role
	ExpiresAt time.Time // end of the session
}

// Actor is the principal as it is written into audit events: `person:<name>`, or `operator`.
func (p Principal) Actor() string {
	if p.Role == RoleOperator {
		return operatorName
	}
	return "person:" + p.Name
}

// Deps are what Auth needs. Store and Audit are required.
type Deps struct {
	Store *jetstream.Store
	Audit *audit.Log
	Log   *slog.Logger     // nil: slog.Default()
	Now   func() time.Time // nil: time.Now
}

// Auth answers from its view of the identities and changes them. Safe for concurrent use.
type Auth struct {
	audit *audit.Log
	log   *slog.Logger
	now   func() time.Time
	real  bool // now is time.Now

	all      *jetstream.Table[record]
	tenants  *jetstream.Table[tenantRecord]
	people   *jetstream.Table[personRecord]
	sessions *jetstream.Table[sessionRecord]
	keys     *jetstream.Table[keyRecord]

	dir       *directory
	confirmed func() time.Time // when the leader confirmed the view
	stop      func()
	asking    atomic.Int64 // clients that wait for the callout
}

// New follows the identities bucket and returns when its present content is in memory.
func New(ctx context.Context, d Deps) (*Auth, error) {
	if d.Store == nil || d.Audit == nil {
		return nil, errors.New("auth: Store and Audit are required")
	}
	if d.Log == nil {
		d.Log = slog.Default()
	}
	realTime := d.Now == nil
	if realTime {
		d.Now = time.Now
	}
	a := &Auth{
		audit: d.Audit, log: d.Log, now: d.Now, real: realTime,
		all:      jetstream.TableOf[record](d.Store, jetstream.Identities),
		tenants:  jetstream.TableOf[tenantRecord](d.Store, jetstream.Identities),
		people:   jetstream.TableOf[personRecord](d.Store, jetstream.Identities),
		sessions: jetstream.TableOf[sessionRecord](d.Store, jetstream.Identities),
		keys:     jetstream.TableOf[keyRecord](d.Store, jetstream.Identities),
		dir:      newDirectory(d.Log),
	}
	view, err := a.all.Follow(ctx, a.dir.apply)
	if err != nil {
		return nil, fmt.Errorf("follow the identities: %w", err)
	}
	for _, row := range view.Rows() {
		a.dir.apply(row)
	}
	a.dir.loaded()
	a.confirmed, a.stop = view.Confirmed, view.Close
	return a, nil
}

// Close stops following. The view stays as it was last, so a late caller is answered, but no new runner is let in any
// more once it is older than StaleAfter.
func (a *Auth) Close() { a.stop() }

// Fresh reports whether the view was confirmed by the bucket's leader within StaleAfter.
func (a *Auth) Fresh() bool { return a.now().Sub(a.confirmed()) < StaleAfter }

// Authenticate returns whose session token it is. It answers from the view, whether or not that is fresh: people keep
// being answered while the bucket has no leader, only new runners are not let in. Any other token than that of a live
// session of a person who was not removed is an error of CodeUnauthorized.
func (a *Auth) Authenticate(token string) (Principal, error) {
	hash, err := schemas.SessionTokenHash(token)
	if err != nil {
		return Principal{}, &schemas.Error{Code: schemas.CodeUnauthorized, Message: "this is not a session token", Hint: "a session token begins with rst1.", Cause: err}
	}
	session, person, ok := a.dir.session(hash)
	if !ok {
		return Principal{}, &schemas.Error{Code: schemas.CodeUnauthorized, Message: "the session token is not valid", Hint: "ask an ORG_ADMIN of your tenant for a new one"}
	}
	if !a.now().Before(session.ExpiresAt) {
		return Principal{}, &schemas.Error{Code: schemas.CodeUnauthorized, Message: "the session has expired", Hint: "ask an ORG_ADMIN of your tenant for a new one"}
	}
	return Principal{Tenant: person.Tenant, Name: person.Name, Role: person.Role, ExpiresAt: session.ExpiresAt}, nil
}

// record makes an event durable. It is called after the change it tells of and before that is acknowledged.
func (a *Auth) record(ctx context.Context, e *runbusv1.AuditEvent) error {
	if err := a.audit.Record(ctx, e); err != nil {
		return schemas.Wrap(schemas.CodeUnavailable, fmt.Errorf("audit %s %s: %w", e.GetAction(), e.GetSubject(), err),
			"the change could not be recorded in the audit log").WithHint("look whether it took effect before you try again")
	}
	return nil
}

// refuse notes a refusal in the audit log and returns it.
func (a *Auth) refuse(by Principal, action, subject string, err *schemas.Error) error {
	a.audit.Note(&runbusv1.AuditEvent{
		Tenant: by.Tenant, Actor: by.Actor(), Action: action, Subject: subject,
		Outcome: string(err.Code), Details: map[string]string{"reason": err.Message},
	})
	return err
}

// storeError is the face of a failed read or write of the bucket.
func storeError(err error) *schemas.Error {
	switch {
	case errors.Is(err, jetstream.ErrLost):
		return schemas.Wrap(schemas.CodeConflict, err, "somebody else changed it at the same moment").WithHint("look at its present state and try again")
	case errors.Is(err, jetstream.ErrUnknown):
		return schemas.Wrap(schemas.CodeUnavailable, err, "it could not be established whether the change took effect").WithHint("look at its present state before you try again")
	}
	return schemas.Wrap(schemas.CodeUnavailable, err, "the identities can't be read or written now").WithHint("try again when /readyz is ready")
}
