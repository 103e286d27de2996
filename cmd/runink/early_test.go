package main

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/org-runink/runbus/cmd/internal/process"
)

// A control plane that is killed before it answered has told which dispatch it was about.
func TestAnIDThatCameBeforeTheAnswer(t *testing.T) {
	for name, c := range map[string]struct {
		then   func(w http.ResponseWriter)
		status int
		text   string // the last one
	}{
		"killed": {func(w http.ResponseWriter) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				err = conn.Close()
			}
			if err != nil {
				t.Error(err)
			}
		}, 4, "`runink fetch trace D1`"},
		"refused": {func(w http.ResponseWriter) {
			problemAnswer(409, `{"code":"runner_offline","detail":"away","outcome":"refused"}`)(w, nil)
		}, 3, "away"},
	} {
		t.Run(name, func(t *testing.T) {
			api := server(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Prefer") != "dispatch-id" {
					t.Errorf("Prefer: %q", r.Header.Get("Prefer"))
				}
				_, _ = io.Copy(io.Discard, r.Body)
				w.Header().Set("Runbus-Dispatch-Id", "D1")
				w.WriteHeader(http.StatusProcessing)
				c.then(w)
			})
			f := &fetch{api: api, progress: noProgress{}}
			_, err := f.copyRaw(t.Context(), "text/csv", io.Discard)
			var text bytes.Buffer
			if status := report(&text, err, false); status != c.status || !strings.Contains(text.String(), c.text) {
				t.Errorf("status %d, %s", status, &text)
			}
			if name == "killed" && !bytes.Contains(process.ErrorJSON(err), []byte(`"dispatchId":"D1"`)) {
				t.Errorf("%s", process.ErrorJSON(err))
			}
		})
	}
}
