package cp_test

import (
	"crypto/sha256"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/cp"
	"github.com/org-runink/runbus/schemas"
)

// shownRunner is a runner as the API shows it.
type shownRunner struct {
	ID, Name, DisplayName, Kind, Address, Zone, State, Description, Link string
	Labels                                                               map[string]string
	ComputeUnits                                                         int
	Health                                                               struct {
		Connected, LimitEnforced bool
		Detail                   string
		CertNotAfter, LastSeen   *time.Time
	}
	Tokens []struct{ ID, State string }
}

// issued is a runner with its ticket.
type issued struct {
	Runner                   shownRunner
	Ticket, Command, TokenID string
	Warning                  string
	ExpiresAt                time.Time
}

// A runner's life over the API, as far as it goes without a host (SPEC R2-R5).
func TestDialledRunnersOverTheAPI(t *testing.T) {
	s := newScene(t)
	a := s.call(t, writer, http.MethodPost, "/api/runners", `{"name":"warehouse","address":"[2001:DB8::7]:7443","zone":"eu-1","labels":{"env":"prod"}}`)
	if a.StatusCode != http.StatusCreated || a.Header.Get("Cache-Control") != "no-store" {
		t.Fatalf("%d %v %s", a.StatusCode, a.Header, a.body)
	}
	var made issued
	if err := json.Unmarshal(a.body, &made); err != nil {
		t.Fatal(err)
	}
	if r := made.Runner; !schemas.IsDialledID(r.ID) || r.Name != "warehouse" || r.DisplayName != "warehouse" || r.Kind != "self_hosted" || r.Link != "dialled" ||
		r.Address != "[2001:db8::7]:7443" || r.Zone != "eu-1" || r.Labels["env"] != "prod" || r.State != "PENDING" ||
		r.Health.Connected || r.Health.Detail != "not enrolled yet" || !r.Health.LimitEnforced || r.Health.CertNotAfter != nil {
		t.Errorf("made %+v", r)
	}
	ticket, err := schemas.ParseTicket(made.Ticket)
	if err != nil {
		t.Fatal(err)
	}
	if ticket.RunnerID != made.Runner.ID || ticket.Name != "warehouse" || ticket.ExpiresAt.Sub(made.ExpiresAt).Abs() > time.Second || ticket.CASHA256 != caOf(t, s) {
		t.Errorf("the ticket is %v until %s", ticket, made.ExpiresAt)
	}
	if want := "CORE_RUNNER_TICKET='" + made.Ticket + "' core-runner serve --listen :7443"; made.Command != want {
		t.Errorf("the command is %q", made.Command)
	}

	// The list has the managed runner first, and the fields of R3.
	a = s.call(t, reader, http.MethodGet, "/api/runners", "")
	var list []shownRunner
	if err := json.Unmarshal(a.body, &list); err != nil || len(list) != 2 {
		t.Fatalf("%s %v", a.body, err)
	}
	if c := list[0]; c.ID != "console" || c.Kind != "managed" || c.DisplayName != "Runink managed" || c.Link != "local" || c.State != "UNKNOWN" ||
		!strings.Contains(c.Description, "liveness was not observed") || c.ComputeUnits != 0 || c.Health.Connected {
		t.Errorf("the managed runner is %+v", c)
	}
	for _, field := range []string{"id", "name", "displayName", "kind", "address", "zone", "labels", "state", "link", "health", "connected", "lastSeen", "version", "certNotAfter", "inFlight", "limit", "limitEnforced"} {
		if n := strings.Count(string(a.body), fmt.Sprintf("%q:", field)); n < len(list) {
			t.Errorf("%s stands %d times in %s", field, n, a.body)
		}
	}
	for _, name := range []string{"warehouse", made.Runner.ID} {
		var shown shownRunner
		s.must(t, reader, http.MethodGet, "/api/runners/"+name, "", &shown)
		if shown.ID != made.Runner.ID || len(shown.Tokens) != 1 || shown.Tokens[0].ID != made.TokenID || shown.Tokens[0].State != "live" {
			t.Errorf("%s is %+v", name, shown)
		}
		if a := s.call(t, stranger, http.MethodGet, "/api/runners/"+name, ""); a.StatusCode != http.StatusNotFound {
			t.Errorf("a stranger sees %s: %d %s", name, a.StatusCode, a.body)
		}
	}

	// A move, a new ticket, the end of it.
	var moved shownRunner
	s.must(t, admin, http.MethodPatch, "/api/runners/warehouse", `{"address":"db.internal:8443"}`, &moved)
	if moved.Address != "db.internal:8443" || moved.Zone != "eu-1" || moved.Labels["env"] != "prod" {
		t.Errorf("moved %+v", moved)
	}
	var next issued
	s.must(t, admin, http.MethodPost, "/api/runners/warehouse/token", "", &next)
	if next.Ticket == made.Ticket || !strings.HasSuffix(next.Command, "--listen :8443") {
		t.Errorf("the next ticket's command is %q", next.Command)
	}
	var detail shownRunner
	s.must(t, admin, http.MethodGet, "/api/runners/warehouse", "", &detail)
	if len(detail.Tokens) != 2 || detail.Tokens[0].State != "revoked" || detail.Tokens[1].State != "live" {
		t.Errorf("tokens %+v", detail.Tokens)
	}
	s.must(t, admin, http.MethodDelete, "/api/runner-tokens/"+next.TokenID, "", nil)
	if a := s.call(t, admin, http.MethodPost, "/api/runners/warehouse/connect", ""); a.StatusCode != http.StatusAccepted {
		t.Errorf("connect: %d %s", a.StatusCode, a.body)
	}

	// An address that another runner has is told of, and is no fault.
	var twin, apart issued
	s.must(t, admin, http.MethodPost, "/api/runners", `{"name":"twin","address":"DB.internal:8443"}`, &twin)
	s.must(t, admin, http.MethodPost, "/api/runners", `{"name":"apart","address":"db.internal:8444"}`, &apart)
	if !strings.Contains(twin.Warning, `"warehouse"`) || apart.Warning != "" || made.Warning != "" {
		t.Errorf("warnings %q, %q, %q", twin.Warning, apart.Warning, made.Warning)
	}
	for _, name := range []string{"twin", "apart"} {
		s.must(t, admin, http.MethodPost, "/api/runners/"+name+"/revoke", "", nil)
		s.must(t, admin, http.MethodDelete, "/api/runners/"+name, "", nil)
	}

	// What is refused, with its code and text.
	for _, c := range []struct {
		method, path, body string
		status             int
		code, text         string
	}{
		{"POST", "/api/runners", `{"name":"warehouse","address":"h:1"}`, 409, "conflict", "already"},
		{"POST", "/api/runners", `{"name":"console","address":"h:1"}`, 400, "invalid", "reserved"},
		{"POST", "/api/runners", `{"name":"x","address":"http://h:1"}`, 400, "invalid", "address"},
		{"POST", "/api/runners", `{"name":"x"}`, 422, "invalid", ""},
		{"POST", "/api/runners", `{"name":"x","address":"h:1","labels":{"a":"","b":"","c":"","d":"","e":"","f":"","g":"","h":"","i":""}}`, 429, "limit", "at most 8 labels"},
		{"PATCH", "/api/runners/console", `{"address":"h:1"}`, 403, "forbidden", "can't be changed"},
		{"POST", "/api/runners/console/token", "", 403, "forbidden", "can't be changed"},
		{"POST", "/api/runners/console/revoke", "", 403, "forbidden", "can't be changed"},
		{"POST", "/api/runners/console/connect", "", 403, "forbidden", "not dialled"},
		{"DELETE", "/api/runners/warehouse", "", 409, "conflict", "only a REVOKED one"},
		{"GET", "/api/runners/warehouse/health", "", 409, "runner_offline", "not enrolled yet"},
		{"POST", "/api/fetches", `{"runnerId":"warehouse","source":{"kind":"file"}}`, 409, "runner_offline", "not enrolled yet"},
		{"POST", "/api/fetches", `{"runnerId":"console","source":{"kind":"file"}}`, 409, "runner_offline",
			"Analysis failed: dedicated runner unreachable — fetch does not run on the control plane: no address of a managed runner is dialled yet"},
	} {
		a := s.call(t, admin, c.method, c.path, c.body)
		if p := a.problem(t); a.StatusCode != c.status || p.Code != c.code || !strings.Contains(p.Detail, c.text) {
			t.Errorf("%s %s %s: %d %s", c.method, c.path, c.body, a.StatusCode, a.body)
		}
	}

	// Revoked for good; its name is free when it is removed.
	var gone shownRunner
	s.must(t, admin, http.MethodPost, "/api/runners/warehouse/revoke", "", &gone)
	if gone.State != "REVOKED" {
		t.Errorf("revoked %+v", gone)
	}
	for path, text := range map[string]string{"/api/runners/warehouse/connect": "was revoked", "/api/runners/warehouse/token": "was revoked"} {
		if p := s.call(t, admin, http.MethodPost, path, "").problem(t); p.Code != "runner_revoked" || !strings.Contains(p.Detail, text) {
			t.Errorf("%s: %+v", path, p)
		}
	}
	if p := s.call(t, admin, http.MethodPost, "/api/fetches", `{"runnerId":"warehouse","source":{"kind":"file"}}`).problem(t); p.Code != "runner_revoked" {
		t.Errorf("a fetch on it: %+v", p)
	}
	s.must(t, admin, http.MethodDelete, "/api/runners/warehouse", "", nil)
	if p := s.call(t, admin, http.MethodPost, "/api/fetches", `{"runnerId":"warehouse","source":{"kind":"file"}}`).problem(t); p.Code != "runner_unknown" {
		t.Errorf("a fetch when it is removed: %+v", p)
	}

	// Each of that is audited, and no ticket is in the audit or in another answer.
	audit := s.call(t, admin, http.MethodGet, "/api/audit?limit=1000", "")
	for _, action := range []string{"runner.create", "runner.edit", "runner.token", "runner.token.revoke", "runner.revoke", "runner.remove"} {
		if !strings.Contains(string(audit.body), fmt.Sprintf("%q", action)) {
			t.Errorf("%s is not in the audit", action)
		}
	}
	for _, secret := range []string{made.Ticket, next.Ticket} {
		for _, part := range []string{secret, secret[len(schemas.TicketPrefix):]} {
			if strings.Contains(string(audit.body)+string(a.body), part) {
				t.Error("a ticket is shown again")
			}
		}
	}
}

// caOf is the SHA-256 of the runner CA's certificate.
func caOf(t *testing.T, s *scene) [32]byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(s.Endpoints().DataDir, "runner-ca", "ca.pem"))
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(text)
	if block == nil {
		t.Fatal("ca.pem has no certificate")
	}
	return sha256.Sum256(block.Bytes)
}

// CORE_RUNNER_ADMINS lists who may change runners; whoever is not on it may look (SPEC R6).
func TestRunnerAdmins(t *testing.T) {
	s := newSceneWith(t, func(c *cp.Config) { c.RunnerAdmins = []string{"walt"} })
	body := `{"name":"warehouse","address":"h:1"}`
	for who, want := range map[string]int{reader: 403, admin: 403, stranger: 403} {
		if a := s.call(t, who, http.MethodPost, "/api/runners", body); a.StatusCode != want {
			t.Errorf("%s: %d %s", who, a.StatusCode, a.body)
		}
	}
	if a := s.call(t, writer, http.MethodPost, "/api/runners", body); a.StatusCode != http.StatusCreated {
		t.Errorf("walt: %d %s", a.StatusCode, a.body)
	}
	if a := s.call(t, admin, http.MethodGet, "/api/runners/warehouse", ""); a.StatusCode != http.StatusOK {
		t.Errorf("the admin may look: %d %s", a.StatusCode, a.body)
	}
}

func TestRunnerAdminsFromTheEnvironment(t *testing.T) {
	for _, row := range [][2]string{
		{"", ""}, {"walt", "walt"}, {" walt , local/rita,", "walt|local/rita"}, {",", "error"}, {"Walt", "error"}, {"a/b/c", "error"}, {"/walt", "error"}, {"local/", "error"},
	} {
		list, want := row[0], row[1]
		c, err := cp.ConfigFromEnv(func(name string) string {
			if name == "CORE_RUNNER_ADMINS" {
				return list
			}
			return ""
		})
		got := strings.Join(c.RunnerAdmins, "|")
		if err != nil {
			got = "error"
		}
		if got != want || err != nil && !strings.Contains(err.Error(), "CORE_RUNNER_ADMINS") {
			t.Errorf("%q gives %q, %v", list, got, err)
		}
	}
}
