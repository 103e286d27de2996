package auth

import (
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
		token, err := e.auth.RecoverTenant(t.Context(), c.by, c.tenant, c.admin)
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
	for _, admin := range []string{OwnerName, "ada"} {
		token, err := e.auth.RecoverTenant(t.Context(), e.operator, "acme", admin)
		must(t, err)
		if p, err := e.auth.Authenticate(token); err != nil || p.Tenant != "acme" || p.Name != admin || p.Role != RoleOrgAdmin {
			t.Errorf("the token is %+v's (%v)", p, err)
		}
		again, err := e.auth.RecoverTenant(t.Context(), e.operator, "acme", admin)
		must(t, err)
		if _, err := e.auth.Authenticate(token); err == nil {
			t.Errorf("the session of %s before goes on", admin)
		}
		if _, err := e.auth.Authenticate(again); err != nil {
			t.Errorf("the new session of %s: %v", admin, err)
		}
	}
}
