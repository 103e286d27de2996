package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

// Who acts is the context that was typed, wherever that was, and RUNINK_CONTEXT's only where none was.
func TestATypedContextGoesBeforeTheVariable(t *testing.T) {
	t.Setenv("HOME", t.TempDir())
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	asked := make(chan string, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- r.Header.Get("Authorization")
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, "[]")
	}))
	defer server.Close()
	tokens := map[string]string{}
	for _, name := range []string{"ada", "acme", "main"} { // the last is the current one
		tokens[name] = schemas.NewSessionToken()
		if err := saveContext(name, endpoint{URL: server.URL, Token: tokens[name]}, true); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ variable, args, want string }{
		{"ada", "--context acme runner list", "acme"},
		{"ada", "runner list --context acme", "acme"},
		{"ada", "runner list", "ada"},
		{"", "--context ada runner list --context acme", "acme"},
		{"", "runner list", "main"},
	} {
		t.Run(c.variable+" "+c.args, func(t *testing.T) {
			t.Setenv("RUNINK_CONTEXT", c.variable)
			app := newApp()
			app.Writer = io.Discard
			if err := app.Run(append([]string{"runink"}, strings.Fields(c.args)...)); err != nil {
				t.Fatal(err)
			}
			if got := <-asked; got != "Bearer "+tokens[c.want] {
				t.Errorf("it acts not as %s", c.want)
			}
		})
	}
}
