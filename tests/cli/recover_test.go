package cli

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
)

// An operator gives an admin of a tenant a new session: by force alone while one of its admins has one.
func TestTenantRecover(t *testing.T) {
	u := startUp(t, t.TempDir(), filepath.Join(t.TempDir(), "data"), "--no-runner")
	must := func(args ...string) string {
		t.Helper()
		r := u.runink(t, args...)
		if r.status != 0 {
			t.Fatalf("%v: %+v", args, r)
		}
		return r.stdout
	}
	must("tenant", "create", "--save-context", "acme", "acme")
	r := u.runink(t, "tenant", "recover", "--json", "acme")
	if code, text, hint := r.failure(t); r.status != 3 || code != "conflict" || !strings.Contains(text, "with a session: owner") || !strings.Contains(hint, "--force") {
		t.Errorf("while its admin has a session: %+v", r)
	}
	must("--context", "acme", "user", "list") // goes on
	r = u.runink(t, "tenant", "recover", "--json", "--force", "--admin", "nobody", "acme")
	if code, _, hint := r.failure(t); r.status != 3 || code != "not_found" || !strings.Contains(hint, "owner") {
		t.Errorf("a person who is not there: %+v", r)
	}

	must("tenant", "recover", "--force", "--save-context", "again", "acme")
	if r := u.runink(t, "--context", "acme", "user", "list"); r.status != 3 {
		t.Errorf("the session before goes on: %+v", r)
	}
	var events []struct {
		Action, Subject, Outcome string
		Details                  map[string]string
	}
	if err := json.Unmarshal([]byte(must("--context", "again", "audit", "list", "--json")), &events); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range events {
		if e.Action == "tenant.recover" {
			got = append(got, strings.Join([]string{e.Subject, e.Outcome, e.Details["by"], e.Details["force"], e.Details["sessionsEnded"]}, " "))
		}
	}
	want := "person:owner conflict operator false \nperson:nobody not_found operator true \nperson:owner ok operator true 1"
	if strings.Join(got, "\n") != want {
		t.Errorf("the tenant's log has\n%s\nwant\n%s", strings.Join(got, "\n"), want)
	}
	if r := u.runink(t, "--context", "again", "tenant", "recover", "--force", "acme"); r.status != 3 || !strings.Contains(r.stderr, "only the platform's operator") {
		t.Errorf("an admin: %+v", r)
	}
}
