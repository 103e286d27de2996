package auth

import (
	"context"
	"errors"
	"strings"

	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// RecoverTenant ends all sessions of an ORG_ADMIN of a tenant and returns a new token for them, valid for SessionLife: the way back for a
// tenant whose admins have no session left, since only an admin with one renews another's. Only the operator may (CodeForbidden). A
// tenant or person who isn't there is CodeNotFound, a person of another role CodeConflict. The tenant's audit has it, as
// `tenant.recover`.
func (a *Auth) RecoverTenant(ctx context.Context, by Principal, tenant, admin string) (token string, err error) {
	const action = "tenant.recover"
	subject := "tenant:" + clip(tenant)
	if err := operator(by, "give a tenant's admin a new session"); err != nil {
		return "", a.refuse(by, action, subject, err)
	}
	row, rerr := a.adminOf(ctx, tenant, admin)
	if rerr != nil {
		return "", a.refuse(by, action, subject, rerr)
	}
	token, rerr = a.renew(ctx, row, SessionLife)
	if rerr != nil {
		return "", a.refuse(by, action, subject, rerr)
	}
	err = a.record(ctx, &runbusv1.AuditEvent{
		Tenant: tenant, Actor: by.Actor(), Action: action, Subject: "person:" + admin, Outcome: "ok",
	})
	if err != nil {
		return "", err // as in NewSession
	}
	return token, nil
}

// adminOf reads an ORG_ADMIN of a tenant from the leader.
func (a *Auth) adminOf(ctx context.Context, tenant, name string) (jetstream.Row[personRecord], *schemas.Error) {
	none := jetstream.Row[personRecord]{}
	noTenant := schemas.Errorf(schemas.CodeNotFound, "there is no tenant %q", clip(tenant)).WithHint("`runink tenant list` shows the tenants")
	if schemas.ValidTenant(tenant) != nil {
		return none, noTenant
	}
	_, err := a.tenants.Get(ctx, tenantKey(tenant))
	switch {
	case errors.Is(err, jetstream.ErrNotFound):
		return none, noTenant
	case err != nil:
		return none, storeError(err)
	}
	row, rerr := a.person(ctx, tenant, name)
	switch {
	case rerr != nil && rerr.Code == schemas.CodeNotFound:
		return none, rerr.WithHint(a.whoIsAdmin(tenant))
	case rerr != nil:
		return none, rerr
	case row.Value.Role != RoleOrgAdmin:
		return none, schemas.Errorf(schemas.CodeConflict, "%q is a %s of the tenant: the operator renews the session of an ORG_ADMIN alone", name, row.Value.Role).
			WithHint(a.whoIsAdmin(tenant))
	}
	return row, nil
}

// whoIsAdmin names the admins of a tenant.
func (a *Auth) whoIsAdmin(tenant string) string {
	var names []string
	for _, p := range a.dir.peopleOf(tenant) {
		if p.Role == RoleOrgAdmin {
			names = append(names, p.Name)
		}
	}
	if len(names) == 0 {
		return "the tenant has no ORG_ADMIN at all: creating it again (`runink tenant create`) makes its first one"
	}
	return "its ORG_ADMINs: " + strings.Join(names, ", ")
}
