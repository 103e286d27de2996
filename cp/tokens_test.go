package cp

import (
	"net/http"
	"os"
	"strings"
	"testing"
)

// C3: a ticket that was not used before the control plane restarts can't be proven any more. It is not shown as one that can.
func TestATokenAfterARestart(t *testing.T) {
	dir := private(t)
	c := start(t, testConfig(t, dir))
	defer func() { c.Stop() }()
	body, err := os.ReadFile(c.Endpoints().AdminToken)
	if err != nil {
		t.Fatal(err)
	}
	admin := strings.TrimSpace(string(body))
	states := func(want ...string) {
		t.Helper()
		var shown struct{ Tokens []struct{ State string } }
		if status := call(t, c, http.MethodGet, "/api/runners/edge", admin, "", &shown); status != http.StatusOK {
			t.Fatalf("status %d", status)
		}
		var got []string
		for _, token := range shown.Tokens {
			got = append(got, token.State)
		}
		if strings.Join(got, " ") != strings.Join(want, " ") {
			t.Errorf("the tokens are %q, want %q", got, want)
		}
	}
	if status := call(t, c, http.MethodPost, "/api/runners", admin, `{"name":"edge","address":"127.0.0.1:1"}`, nil); status != http.StatusCreated {
		t.Fatalf("status %d", status)
	}
	states("live")
	c.Stop()
	c = start(t, testConfig(t, dir))
	states("lost")
	if status := call(t, c, http.MethodPost, "/api/runners/edge/token", admin, "", nil); status != http.StatusCreated {
		t.Fatalf("status %d", status)
	}
	states("revoked", "live")
}
