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
	const path = "/api/tenants/umbrella/session"
	for _, body := range []string{"", "{}", `{"force":false}`} { // its admin has a session
		if a := s.call(t, operator, http.MethodPost, path, body); a.StatusCode != http.StatusConflict || a.problem(t).Code != "conflict" {
			t.Errorf("%q: %d %s", body, a.StatusCode, a.body)
		}
	}
	if a := s.call(t, stranger, http.MethodGet, "/api/session", ""); a.StatusCode != http.StatusOK {
		t.Errorf("a refused attempt ended the session: %d", a.StatusCode)
	}
	s.must(t, operator, http.MethodPost, path, `{"force":true}`, &made)
	if made.Name != "owner" || made.Token == "" || made.Token == s.tokens[stranger] {
		t.Fatalf("the answer names %q", made.Name)
	}
	if a := s.call(t, stranger, http.MethodGet, "/api/session", ""); a.StatusCode != http.StatusUnauthorized {
		t.Errorf("the session before goes on: %d", a.StatusCode)
	}
	s.tokens[stranger] = made.Token
	var events []auditEvent
	s.must(t, stranger, http.MethodGet, "/api/audit?limit=1000", "", &events)
	var outcomes []string
	for _, e := range events { // the oldest first
		if e.Action == "tenant.recover" && e.Actor == "operator" && e.Subject == "person:owner" && e.Details["by"] == "operator" {
			outcomes = append(outcomes, e.Outcome+" "+e.Details["force"]+" "+e.Details["sessionsEnded"])
		}
	}
	if want := []string{"conflict false ", "conflict false ", "conflict false ", "ok true 1"}; !slices.Equal(outcomes, want) {
		t.Errorf("the tenant's audit has %q of\n%+v", outcomes, events)
	}
}
