package auth

import (
	"context"
	"errors"
	"time"

	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// CreateTenant makes a tenant and its first admin, `owner`, and returns that admin's session token, which can't be shown
// again. Only the operator may (CodeForbidden). A tenant that exists is CodeConflict, but for one that has no admin at
// all, as after a call that was cut off half-way: it gets one.
func (a *Auth) CreateTenant(ctx context.Context, by Principal, name string) (adminToken string, err error) {
	const action = "tenant.create"
	subject := "tenant:" + clip(name)
	if err := operator(by, "create tenants"); err != nil {
		return "", a.refuse(by, action, subject, err)
	}
	if err := schemas.ValidTenant(name); err != nil {
		return "", a.refuse(by, action, subject, asError(err))
	}
	if err := a.addTenant(ctx, name, by.Actor()); err != nil {
		return "", a.refuse(by, action, subject, asError(err))
	}
	owner := a.newPerson(name, OwnerName, RoleOrgAdmin, by.Actor())
	token, rerr := a.addPerson(ctx, owner, SessionLife)
	if rerr != nil {
		return "", a.refuse(by, action, subject, rerr)
	}
	err = a.record(ctx, &runbusv1.AuditEvent{
		Tenant: name, Actor: by.Actor(), Action: action, Subject: subject, Outcome: "ok",
		Details: map[string]string{"admin": OwnerName},
	})
	if err != nil {
		a.undoPerson(ctx, owner)
		return "", err
	}
	return token, nil
}

// addTenant makes the tenant's record. It returns nil as well if that is there but the tenant has no admin.
func (a *Auth) addTenant(ctx context.Context, name, by string) error {
	record := tenantRecord{Name: name, CreatedAt: a.now().UTC(), CreatedBy: by}
	revision, err := a.tenants.Create(ctx, tenantKey(name), record)
	if err == nil {
		wrote(a.dir, tenantKey(name), record, revision)
		return nil
	}
	if !errors.Is(err, jetstream.ErrLost) {
		return storeError(err)
	}
	rows, err := a.all.List(ctx)
	if err != nil {
		return storeError(err)
	}
	for _, row := range rows {
		a.dir.apply(row)
	}
	for _, p := range a.dir.peopleOf(name) {
		if p.Role == RoleOrgAdmin {
			return schemas.Errorf(schemas.CodeConflict, "the tenant %q exists", name).WithHint("choose another name")
		}
	}
	return nil
}

// Tenants lists all tenants by name. Only the operator may (CodeForbidden).
func (a *Auth) Tenants(_ context.Context, by Principal) ([]Tenant, error) {
	if err := operator(by, "list tenants"); err != nil {
		return nil, a.refuse(by, "tenant.list", "platform", err)
	}
	return a.dir.allTenants(), nil
}

// CreatePerson makes a person in by's tenant with a role of READER, WRITER or ORG_ADMIN and returns their session token,
// valid for SessionLife, which can't be shown again. Only an ORG_ADMIN may (CodeForbidden). A person of that name is
// CodeConflict; an empty, malformed or reserved name, or another role, is CodeInvalid.
func (a *Auth) CreatePerson(ctx context.Context, by Principal, name string, role Role) (token string, err error) {
	const action = "person.create"
	subject := "person:" + clip(name)
	if err := a.tenantAdmin(by, "create people"); err != nil {
		return "", a.refuse(by, action, subject, err)
	}
	if err := schemas.ValidName("name of the person", name); err != nil {
		return "", a.refuse(by, action, subject, asError(err))
	}
	if role != RoleReader && role != RoleWriter && role != RoleOrgAdmin {
		return "", a.refuse(by, action, subject, schemas.Errorf(schemas.CodeInvalid,
			"%q is not a role of a person: use READER, WRITER or ORG_ADMIN", clip(string(role))))
	}
	if len(a.dir.peopleOf(by.Tenant)) >= maxPeople {
		return "", a.refuse(by, action, subject, schemas.Errorf(schemas.CodeLimit, "the tenant has %d people: that is the limit", maxPeople))
	}
	person := a.newPerson(by.Tenant, name, role, by.Actor())
	token, rerr := a.addPerson(ctx, person, SessionLife)
	if rerr != nil {
		return "", a.refuse(by, action, subject, rerr)
	}
	err = a.record(ctx, &runbusv1.AuditEvent{
		Tenant: by.Tenant, Actor: by.Actor(), Action: action, Subject: subject, Outcome: "ok",
		Details: map[string]string{"role": string(role)},
	})
	if err != nil {
		a.undoPerson(ctx, person)
		return "", err
	}
	return token, nil
}

// People lists the people of by's tenant by name, without their tokens. Only an ORG_ADMIN may (CodeForbidden).
func (a *Auth) People(_ context.Context, by Principal) ([]Person, error) {
	if err := a.tenantAdmin(by, "list people"); err != nil {
		return nil, a.refuse(by, "person.list", "tenant:"+by.Tenant, err)
	}
	return a.dir.peopleOf(by.Tenant), nil
}

// RemovePerson removes a person of by's tenant; all their sessions end with it. Only an ORG_ADMIN may (CodeForbidden), and
// not themselves (CodeConflict), so that a tenant keeps an admin. A person who isn't there is CodeNotFound.
func (a *Auth) RemovePerson(ctx context.Context, by Principal, name string) error {
	const action = "person.remove"
	subject := "person:" + clip(name)
	if err := a.tenantAdmin(by, "remove people"); err != nil {
		return a.refuse(by, action, subject, err)
	}
	if name == by.Name {
		return a.refuse(by, action, subject, schemas.Errorf(schemas.CodeConflict, "nobody removes themselves").WithHint("another ORG_ADMIN can"))
	}
	row, rerr := a.person(ctx, by.Tenant, name)
	if rerr != nil {
		return a.refuse(by, action, subject, rerr)
	}
	if err := a.people.Delete(ctx, row.Key, row.Revision); err != nil {
		return a.refuse(by, action, subject, storeError(err))
	}
	a.dir.deleted(row.Key, row.Revision)
	a.sweep(ctx)
	return a.record(ctx, &runbusv1.AuditEvent{
		Tenant: by.Tenant, Actor: by.Actor(), Action: action, Subject: subject, Outcome: "ok",
		Details: map[string]string{"role": string(row.Value.Role)},
	})
}

// NewSession ends all sessions of a person of by's tenant and returns a new token for them, valid for SessionLife. Only an
// ORG_ADMIN may (CodeForbidden). A person who isn't there is CodeNotFound.
func (a *Auth) NewSession(ctx context.Context, by Principal, name string) (token string, err error) {
	const action = "session.create"
	subject := "person:" + clip(name)
	if err := a.tenantAdmin(by, "issue session tokens"); err != nil {
		return "", a.refuse(by, action, subject, err)
	}
	row, rerr := a.person(ctx, by.Tenant, name)
	if rerr != nil {
		return "", a.refuse(by, action, subject, rerr)
	}
	token, rerr = a.renew(ctx, row, SessionLife)
	if rerr != nil {
		return "", a.refuse(by, action, subject, rerr)
	}
	err = a.record(ctx, &runbusv1.AuditEvent{
		Tenant: by.Tenant, Actor: by.Actor(), Action: action, Subject: subject, Outcome: "ok",
	})
	if err != nil {
		return "", err // the old sessions have ended, and nobody has the new token: the next call makes another one
	}
	return token, nil
}

func (a *Auth) newPerson(tenant, name string, role Role, by string) personRecord {
	return personRecord{Tenant: tenant, Name: name, Role: role, CreatedAt: a.now().UTC(), CreatedBy: by, Generation: schemas.NewID()}
}

// person reads a person's record from the leader.
func (a *Auth) person(ctx context.Context, tenant, name string) (jetstream.Row[personRecord], *schemas.Error) {
	notFound := schemas.Errorf(schemas.CodeNotFound, "the tenant has no person %q", clip(name))
	if schemas.ValidName("name of the person", name) != nil {
		return jetstream.Row[personRecord]{}, notFound
	}
	row, err := a.people.Get(ctx, personKey(tenant, name))
	if errors.Is(err, jetstream.ErrNotFound) {
		return row, notFound
	}
	if err != nil {
		return row, storeError(err)
	}
	return row, nil
}

// addPerson makes a person with a session. The session is written first: it counts for nothing until the person's record,
// whose creation decides, has its generation.
func (a *Auth) addPerson(ctx context.Context, p personRecord, life time.Duration) (token string, rerr *schemas.Error) {
	token, rerr = a.addSession(ctx, p, life)
	if rerr != nil {
		return "", rerr
	}
	revision, err := a.people.Create(ctx, p.key(), p)
	if errors.Is(err, jetstream.ErrLost) {
		return "", schemas.Errorf(schemas.CodeConflict, "the tenant has a person %q", p.Name).WithHint("choose another name")
	}
	if err != nil {
		return "", storeError(err)
	}
	wrote(a.dir, p.key(), p, revision)
	return token, nil
}

// renew ends all sessions of a person, by a new generation, and makes a new one.
func (a *Auth) renew(ctx context.Context, row jetstream.Row[personRecord], life time.Duration) (token string, rerr *schemas.Error) {
	person := row.Value
	person.Generation = schemas.NewID()
	token, rerr = a.addSession(ctx, person, life)
	if rerr != nil {
		return "", rerr
	}
	revision, err := a.people.Update(ctx, row.Key, person, row.Revision)
	if err != nil {
		return "", storeError(err)
	}
	wrote(a.dir, row.Key, person, revision)
	return token, nil
}

func (a *Auth) addSession(ctx context.Context, p personRecord, life time.Duration) (token string, rerr *schemas.Error) {
	a.sweep(ctx)
	token = schemas.NewSessionToken()
	hash, err := schemas.SessionTokenHash(token)
	if err != nil {
		return "", schemas.Wrap(schemas.CodeFailed, err, "the session could not be made")
	}
	now := a.now().UTC()
	s := sessionRecord{
		Tenant: p.Tenant, Person: p.Name, Operator: p.Role == RoleOperator, Generation: p.Generation,
		CreatedAt: now, ExpiresAt: now.Add(life),
	}
	revision, err := a.sessions.Create(ctx, sessionKey(hash), s)
	if err != nil {
		return "", storeError(err)
	}
	wrote(a.dir, sessionKey(hash), s, revision)
	return token, nil
}

// undoPerson takes back a person whose token nobody was shown.
func (a *Auth) undoPerson(ctx context.Context, p personRecord) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	at := p.key()
	revision := a.dir.revision(at)
	if err := a.people.Delete(ctx, at, revision); err != nil {
		a.log.Error("a person whose token was never shown stays", "tenant", p.Tenant, "person", p.Name, "error", err)
		return
	}
	a.dir.deleted(at, revision)
}

// sweep deletes some sessions that count no more. It decides nothing: expiry and generation do, when a token is shown.
func (a *Auth) sweep(ctx context.Context) {
	const most = 16
	for _, hash := range a.dir.deadSessions(a.now(), most) {
		at := sessionKey(hash)
		revision := a.dir.revision(at)
		if err := a.sessions.Delete(ctx, at, revision); err != nil {
			a.log.Debug("sweep sessions", "error", err)
			return
		}
		a.dir.deleted(at, revision)
	}
}
