package cp_test

import (
	"net/http"
	"slices"
	"testing"
)

// A tenant that the operator gives back to its admin has that in its own audit.
func TestARecoveryIsInTheTenantsAudit(t *testing.T) {
	s := newScene(t)
	var made struct{ Name, Token string }
	s.must(t, operator, http.MethodPost, "/api/tenants/umbrella/session", "", &made)
	if made.Name != "owner" || made.Token == "" || made.Token == s.tokens[stranger] {
		t.Fatalf("the answer names %q", made.Name)
	}
	if a := s.call(t, stranger, http.MethodGet, "/api/session", ""); a.StatusCode != http.StatusUnauthorized {
		t.Errorf("the session before goes on: %d", a.StatusCode)
	}
	s.tokens[stranger] = made.Token
	var events []auditEvent
	s.must(t, stranger, http.MethodGet, "/api/audit?limit=1000", "", &events)
	if !slices.ContainsFunc(events, func(e auditEvent) bool {
		return e.Action == "tenant.recover" && e.Actor == "operator" && e.Subject == "person:owner" && e.Outcome == "ok"
	}) {
		t.Errorf("the tenant's audit has %+v", events)
	}
}
