package auth

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

// The operator gives a tenant back to an admin of it who has no session left, and to nobody else.
func TestATenantIsRecovered(t *testing.T) {
	e := newEnv(t)
	owner, first := e.tenant(t, "acme")
	stranger, _ := e.tenant(t, "zeta")
	_, err := e.auth.CreatePerson(t.Context(), owner, "rita", RoleReader)
	must(t, err)
	_, err = e.auth.CreatePerson(t.Context(), owner, "ada", RoleOrgAdmin)
	must(t, err)
	e.clock.set(SessionLife + 1)
	if _, err := e.auth.Authenticate(first); err == nil {
		t.Fatal("the session has not ended")
	}
	for _, c := range []struct {
		by            Principal
		tenant, admin string
		code          schemas.Code
		text          string
	}{
		{owner, "acme", OwnerName, schemas.CodeForbidden, "only the platform's operator"},
		{stranger, "acme", OwnerName, schemas.CodeForbidden, "only the platform's operator"},
		{Principal{}, "acme", OwnerName, schemas.CodeUnauthorized, "who is not signed in"},
		{e.operator, "none", OwnerName, schemas.CodeNotFound, `no tenant "none"`},
		{e.operator, "*", OwnerName, schemas.CodeNotFound, `no tenant "*"`},
		{e.operator, "acme", "paul", schemas.CodeNotFound, `no person "paul"`},
		{e.operator, "acme", "*", schemas.CodeNotFound, "no person"},
		{e.operator, "acme", "rita", schemas.CodeConflict, `"rita" is a READER`},
	} {
		token, err := e.auth.RecoverTenant(t.Context(), c.by, c.tenant, c.admin, true)
		if schemas.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s of %s: %v", c.admin, c.tenant, err)
		}
		if token != "" {
			t.Errorf("%s of %s: a token comes with the refusal", c.admin, c.tenant)
		}
		if c.code == schemas.CodeConflict && !strings.Contains(asError(err).Hint, "ada, owner") {
			t.Errorf("the hint is %q", asError(err).Hint)
		}
	}
	recovered := func(admin string, force bool) string {
		t.Helper()
		token, err := e.auth.RecoverTenant(t.Context(), e.operator, "acme", admin, force)
		must(t, err)
		if p, err := e.auth.Authenticate(token); err != nil || p.Tenant != "acme" || p.Name != admin || p.Role != RoleOrgAdmin {
			t.Errorf("the token is %+v's (%v)", p, err)
		}
		return token
	}
	token := recovered(OwnerName, false)
	for _, admin := range []string{OwnerName, "ada"} { // now one has a session
		_, err := e.newAuth(t).RecoverTenant(t.Context(), e.operator, "acme", admin, false)
		wantError(t, err, schemas.CodeConflict, `the tenant "acme" has an ORG_ADMIN with a session: owner`)
		if !strings.Contains(asError(err).Hint, "--force") {
			t.Errorf("the hint is %q", asError(err).Hint)
		}
		if _, err := e.auth.Authenticate(token); err != nil {
			t.Errorf("the refused attempt ended the session: %v", err)
		}
	}
	again := recovered(OwnerName, true)
	if _, err := e.auth.Authenticate(token); err == nil {
		t.Error("the session before goes on")
	}
	recovered("ada", true)
	if _, err := e.auth.Authenticate(again); err != nil {
		t.Errorf("the session of another admin: %v", err)
	}

	// All of it is in the tenant's log, the oldest first: what is recorded last comes behind the notes before it.
	events, err := e.audit.List(t.Context(), "acme", 100)
	must(t, err)
	var got []string
	for _, ev := range events {
		if d := ev.GetDetails(); ev.GetAction() == "tenant.recover" && ev.GetActor() == "operator" {
			got = append(got, fmt.Sprintf("%s %s by=%s force=%s ended=%s", ev.GetSubject(), ev.GetOutcome(), d["by"], d["force"], d["sessionsEnded"]))
		}
	}
	want := []string{
		"person:paul not_found by=operator force=true ended=",
		"person:* not_found by=operator force=true ended=",
		"person:rita conflict by=operator force=true ended=",
		"person:owner ok by=operator force=false ended=0",
		"person:owner conflict by=operator force=false ended=",
		"person:ada conflict by=operator force=false ended=",
		"person:owner ok by=operator force=true ended=1",
		"person:ada ok by=operator force=true ended=0",
	}
	if !slices.Equal(got, want) {
		t.Errorf("the tenant's log has\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
