package cp_test

import (
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"testing"
)

// Who prefers it has the id of a dispatch before its answer; nobody else gets an interim response.
func TestTheIDBeforeTheAnswer(t *testing.T) {
	s := newScene(t)
	for _, prefer := range []string{"", "wait=5", "dispatch-id", "wait=5, Dispatch-ID"} {
		var interim []int
		early := ""
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
			interim, early = append(interim, code), h.Get("Runbus-Dispatch-Id")
			return nil
		}})
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+"/api/fetches", strings.NewReader(`{"runnerId":"nobody","source":{"kind":"file"}}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+s.tokens[writer])
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Accept", "text/csv")
		if prefer != "" {
			req.Header.Set("Prefer", prefer)
		}
		resp, err := s.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if err := resp.Body.Close(); err != nil {
			t.Fatal(err)
		}
		wants := strings.Contains(strings.ToLower(prefer), "dispatch-id")
		id := resp.Header.Get("Runbus-Dispatch-Id")
		if resp.StatusCode != http.StatusNotFound || id == "" {
			t.Errorf("%q: %s, dispatch %q", prefer, resp.Status, id)
		}
		if wants && (len(interim) != 1 || interim[0] != http.StatusProcessing || early != id) || !wants && len(interim) > 0 {
			t.Errorf("%q: interim responses %v with %q, and the dispatch is %q", prefer, interim, early, id)
		}
	}
}
