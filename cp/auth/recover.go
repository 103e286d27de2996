package auth

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const actionRecover = "tenant.recover"

// RecoverTenant ends all sessions of an ORG_ADMIN of a tenant and returns a new token for them, valid for SessionLife: the way back for a
// tenant whose admins have no session left, since only an admin with one renews another's. While any of its ORG_ADMINs has one it is
// refused with CodeConflict, unless force is set. Only the operator may (CodeForbidden). A tenant or person who isn't there is
// CodeNotFound, a person of another role CodeConflict. The tenant's audit has it, as `tenant.recover`, with who did it, whether by force,
// and how many sessions ended; it has the operator's refused attempts too.
func (a *Auth) RecoverTenant(ctx context.Context, by Principal, tenant, admin string, force bool) (token string, err error) {
	subject := "tenant:" + clip(tenant)
	if err := operator(by, "give a tenant's admin a new session"); err != nil {
		return "", a.refuse(by, actionRecover, subject, err)
	}
	if err := a.tenantThere(ctx, tenant); err != nil {
		return "", a.refuse(by, actionRecover, subject, err)
	}
	token, ended, rerr := a.recoverAdmin(ctx, tenant, admin, force)
	if rerr != nil {
		a.audit.Note(&runbusv1.AuditEvent{
			Tenant: tenant, Actor: by.Actor(), Action: actionRecover, Subject: "person:" + clip(admin), Outcome: string(rerr.Code),
			Details: map[string]string{"reason": rerr.Message, "by": by.Actor(), "force": strconv.FormatBool(force)},
		})
		return "", a.refuse(by, actionRecover, subject, rerr)
	}
	err = a.record(ctx, &runbusv1.AuditEvent{
		Tenant: tenant, Actor: by.Actor(), Action: actionRecover, Subject: "person:" + admin, Outcome: "ok",
		Details: map[string]string{"by": by.Actor(), "force": strconv.FormatBool(force), "sessionsEnded": strconv.Itoa(ended)},
	})
	if err != nil {
		return "", err // as in NewSession
	}
	return token, nil
}

// recoverAdmin gives an ORG_ADMIN a new session, and tells how many of theirs it ended.
func (a *Auth) recoverAdmin(ctx context.Context, tenant, admin string, force bool) (token string, ended int, rerr *schemas.Error) {
	row, rerr := a.adminOf(ctx, tenant, admin)
	if rerr != nil {
		return "", 0, rerr
	}
	live, rerr := a.liveAdmins(ctx, tenant)
	if rerr != nil {
		return "", 0, rerr
	}
	if len(live) > 0 && !force {
		return "", 0, schemas.Errorf(schemas.CodeConflict, "the tenant %q has an ORG_ADMIN with a session: %s", tenant, strings.Join(slices.Sorted(maps.Keys(live)), ", ")).
			WithHint("an admin with a session renews the others' (`runink user renew`); `runink tenant recover --force` does it all the same, and the tenant's audit says so")
	}
	token, rerr = a.renew(ctx, row, SessionLife)
	return token, live[admin], rerr
}

// tenantThere asks the leader for a tenant: CodeNotFound if there is none.
func (a *Auth) tenantThere(ctx context.Context, tenant string) *schemas.Error {
	err := schemas.ValidTenant(tenant)
	if err == nil {
		_, err = a.tenants.Get(ctx, tenantKey(tenant))
		if err != nil && !errors.Is(err, jetstream.ErrNotFound) {
			return storeError(err)
		}
	}
	if err != nil {
		return schemas.Errorf(schemas.CodeNotFound, "there is no tenant %q", clip(tenant)).WithHint("`runink tenant list` shows the tenants")
	}
	return nil
}

// liveAdmins asks the leader how many sessions each ORG_ADMIN of a tenant has, those without one left out.
func (a *Auth) liveAdmins(ctx context.Context, tenant string) (map[string]int, *schemas.Error) {
	rows, err := a.all.List(ctx)
	if err != nil {
		return nil, storeError(err)
	}
	now := newDirectory(a.log) // not a.dir, which may be behind another replica
	for _, row := range rows {
		now.apply(row)
	}
	return now.liveAdmins(tenant, a.now()), nil
}

// adminOf reads an ORG_ADMIN of a tenant from the leader.
func (a *Auth) adminOf(ctx context.Context, tenant, name string) (jetstream.Row[personRecord], *schemas.Error) {
	row, rerr := a.person(ctx, tenant, name)
	switch {
	case rerr != nil && rerr.Code == schemas.CodeNotFound:
		return row, rerr.WithHint(a.whoIsAdmin(tenant))
	case rerr != nil:
		return row, rerr
	case row.Value.Role != RoleOrgAdmin:
		return row, schemas.Errorf(schemas.CodeConflict, "%q is a %s of the tenant: the operator renews the session of an ORG_ADMIN alone", name, row.Value.Role).
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
