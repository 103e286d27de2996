package cp_test

import (
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

// auditEvent is an event of the audit as the API shows it.
type auditEvent struct {
	Actor, Action, Subject, Outcome string
	Details                         map[string]string
}

// audited are the events of an actor, oldest first.
func (s *scene) audited(t *testing.T, actor string) (events []auditEvent) {
	t.Helper()
	// What is recorded durably comes behind the notes before it.
	s.must(t, admin, http.MethodPost, "/api/people/walt/session", "", nil)
	var all []auditEvent
	a := s.call(t, admin, http.MethodGet, "/api/audit?limit=1000", "")
	if err := json.Unmarshal(a.body, &all); err != nil {
		t.Fatalf("%v: %s", err, a.body)
	}
	for _, e := range all {
		if e.Actor == actor {
			events = append(events, e)
		}
	}
	return events
}

// Whatever is refused to somebody who is signed in is in the audit, with what and why (SPEC R8): of each operation that a READER may not.
func TestEveryRefusalIsAudited(t *testing.T) {
	s := newScene(t)
	bodies := map[string]string{
		"POST /api/fetches": `{"runnerId":"edge","source":{"kind":"file"}}`, "POST /api/runners": `{"name":"edge","address":"h:1"}`, "PATCH /api/runners/{id}": `{"name":"edge"}`,
		"POST /api/service-account-keys": `{"name":"edge"}`, "POST /api/tenants": `{"name":"acme"}`, "POST /api/people": `{"name":"paul","role":"READER"}`,
	}
	var refused []string
	for _, operation := range s.operations(t) {
		method, path, _ := strings.Cut(operation, " ")
		path = strings.NewReplacer("{dispatchId}", "01J0000000000000000000NONE", "{id}", "edge", "{name}", "paul").Replace(path)
		if a := s.call(t, reader, method, path, bodies[operation]); a.StatusCode == http.StatusForbidden {
			refused = append(refused, operation)
		}
	}
	if len(refused) < 15 {
		t.Errorf("a READER is refused no more than %q", refused)
	}
	events := s.audited(t, "person:rita")
	if len(events) != len(refused) {
		t.Errorf("%d refusals and %d events:\n%q\n%+v", len(refused), len(events), refused, events)
	}
	for _, e := range events {
		if e.Outcome != "forbidden" || e.Details["reason"] == "" || e.Subject == "" || strings.HasSuffix(e.Subject, ":") {
			t.Errorf("%+v", e)
		}
	}
}

// The same of what can't be done: the event names what was meant, and no token that was given for a name.
func TestWhatRefusalsNameInTheAudit(t *testing.T) {
	s := newScene(t)
	token := schemas.NewSessionToken()
	s.must(t, admin, http.MethodPost, "/api/runners", `{"name":"edge","address":"edge.example.com:7443"}`, nil)
	s.must(t, admin, http.MethodPost, "/api/runners/edge/connect", "", nil)
	for _, c := range []struct {
		method, path, body string
		action, subject    string
	}{
		{"DELETE", "/api/runner-tokens/nosuch", "", "runner.token.revoke", "token:nosuch"},
		{"DELETE", "/api/runner-tokens/" + token, "", "runner.token.revoke", "token"},
		{"POST", "/api/runners/nosuch/connect", "", "runner.connect", "runner:nosuch"},
		{"POST", "/api/runners/" + token + "/connect", "", "runner.connect", "runner"},
		{"POST", "/api/runners/console/connect", "", "runner.connect", "runner:console"},
		{"POST", "/api/runners/nosuch/revoke", "", "runner.revoke", "runner:nosuch"},
		{"POST", "/api/runners/" + token + "/revoke", "", "runner.revoke", "runner"},
		{"POST", "/api/runners/" + token + "/release", "", "runner.release", "runner"},
		{"POST", "/api/runners", `{"name":"` + token + `","address":"h:1"}`, "runner.create", "runner"},
		{"DELETE", "/api/people/" + token, "", "person.remove", "person:(a token)"},
		{"POST", "/api/service-account-keys", `{"name":"` + token + `"}`, "key.mint", "key:sa-(a token)"},
		{"DELETE", "/api/fetches/01J0000000000000000000NONE", "", "dispatch.cancel", "dispatch:01J0000000000000000000NONE"},
	} {
		a := s.call(t, admin, c.method, c.path, c.body)
		if a.StatusCode < 400 || strings.Contains(string(a.body), token) {
			t.Errorf("%s %s: %d %s", c.method, c.path, a.StatusCode, a.body)
		}
		events := s.audited(t, "person:owner")
		if !slices.ContainsFunc(events, func(e auditEvent) bool {
			return e.Action == c.action && e.Subject == c.subject && e.Outcome != "ok" && e.Details["reason"] != ""
		}) {
			t.Errorf("%s %s of %s is not in the audit: %+v", c.method, c.path, c.subject, events)
		}
	}
	events := s.audited(t, "person:owner")
	if !slices.ContainsFunc(events, func(e auditEvent) bool { return e.Action == "runner.connect" && e.Outcome == "ok" }) {
		t.Error("that a runner was dialled on request is not in the audit")
	}
	for _, e := range events {
		for _, text := range slices.AppendSeq([]string{e.Subject}, maps.Values(e.Details)) {
			if strings.Contains(text, token) {
				t.Errorf("a token is in the audit: %s", e.Action)
			}
		}
	}
}
