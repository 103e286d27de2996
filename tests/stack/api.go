package stack

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"testing"
	"time"
)

// API calls the HTTP API with one token.
type API struct {
	URL, Token string
}

// Call makes one call and returns status and body.
func (a *API) Call(t testing.TB, method, path string, body any) (int, []byte) {
	t.Helper()
	resp := a.Send(t, t.Context(), method, path, body, "application/json")
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, b
}

// Send makes one call and returns the response, whatever its status. A fetch that ended Late is asked for again, once; the test fails if
// that has no excuse.
func (a *API) Send(t testing.TB, ctx context.Context, method, path string, body any, accept string) *http.Response { //nolint:revive // t comes first in a test's helper
	t.Helper()
	resp := a.send(t, ctx, method, path, body, accept)
	if path != "/api/fetches" || resp.StatusCode != http.StatusConflict {
		return resp
	}
	b, err := io.ReadAll(resp.Body)
	if closed := resp.Body.Close(); err != nil || closed != nil {
		t.Fatal(err, closed)
	}
	if !Late(string(b)) {
		resp.Body = io.NopCloser(bytes.NewReader(b))
		return resp
	}
	Excuse(t, resp.Header.Get("Runbus-Dispatch-Id"), string(b))
	return a.send(t, ctx, method, path, body, accept)
}

func (a *API) send(t testing.TB, ctx context.Context, method, path string, body any, accept string) *http.Response { //nolint:revive // t comes first in a test's helper
	t.Helper()
	var in io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		in = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, a.URL+path, in)
	if err != nil {
		t.Fatal(err)
	}
	if a.Token != "" {
		req.Header.Set("Authorization", "Bearer "+a.Token)
	}
	req.Header.Set("Accept", accept)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	client := http.Client{Transport: Listen(t, http.DefaultTransport)}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	return resp
}

// Must makes a call that succeeds, and decodes its answer.
func (a *API) Must(t testing.TB, method, path string, body, into any) {
	t.Helper()
	status, b := a.Call(t, method, path, body)
	if status >= 300 {
		t.Fatalf("%s %s: %d %s", method, path, status, b)
	}
	if into != nil {
		if err := json.Unmarshal(b, into); err != nil {
			t.Fatalf("%s %s: %v in %s", method, path, err, b)
		}
	}
}

// MintKey mints a service-account key.
func (a *API) MintKey(t testing.TB, name string) (id, token string) {
	t.Helper()
	var made struct{ ID, Token string }
	a.Must(t, http.MethodPost, "/api/service-account-keys", map[string]string{"name": name}, &made)
	return made.ID, made.Token
}

// RunnerState is a runner as the list shows it.
type RunnerState struct {
	ID      string `json:"id"`
	Name    string `json:"name"`
	Address string `json:"address"`
	State   string `json:"state"`
	Link    string `json:"link"`
	Health  struct {
		Connected, Dispatchable, Draining, LimitEnforced bool
		Detail                                           string
		InFlight, Limit                                  int
		Signals                                          struct{ Connection, Heartbeat, Responders string }
	} `json:"health"`
}

// Runners is the list but for the managed runner, which must be its first.
func (a *API) Runners(t testing.TB) map[string]RunnerState {
	t.Helper()
	var list []RunnerState
	a.Must(t, http.MethodGet, "/api/runners", nil, &list)
	if len(list) == 0 || list[0].ID != "console" {
		t.Fatalf("the managed runner is not the first of %+v", list)
	}
	out := map[string]RunnerState{}
	for _, r := range list[1:] {
		out[r.ID] = r
	}
	return out
}

// runner is the one of this id or name.
func (a *API) runner(t testing.TB, idOrName string) (RunnerState, bool) {
	t.Helper()
	all := a.Runners(t)
	if r, ok := all[idOrName]; ok {
		return r, true
	}
	for _, r := range all {
		if r.Name == idOrName {
			return r, true
		}
	}
	return RunnerState{}, false
}

// AwaitRunner asks until the list shows that the runner takes work, or takes none. The list is a state, not an event, so it is
// asked for again after each answer. A runner is named by id or name.
func (a *API) AwaitRunner(t testing.TB, id string, dispatchable bool) RunnerState {
	t.Helper()
	give := time.Now().Add(Patience)
	for {
		r, ok := a.runner(t, id)
		if ok && r.Health.Dispatchable == dispatchable {
			return r
		}
		if time.Now().After(give) {
			t.Fatalf("runner %q: dispatchable is %v, not %v: %+v", id, r.Health.Dispatchable, dispatchable, r)
		}
		<-time.After(20 * time.Millisecond)
	}
}

// Line is one line of a fetch's NDJSON.
type Line struct {
	Type       string           `json:"type"`
	DispatchID string           `json:"dispatchId"`
	Outcome    string           `json:"outcome"`
	Code       string           `json:"code"`
	Message    string           `json:"message"`
	Hint       string           `json:"hint"`
	Phase      string           `json:"phase"`
	RunnerID   string           `json:"runnerId"`
	RunnerPID  int64            `json:"runnerPid"`
	Rows       int64            `json:"rows"`
	Bytes      int64            `json:"bytes"`
	Row        json.RawMessage  `json:"row"`
	Columns    []map[string]any `json:"columns"`
	Phases     []struct {
		Phase string    `json:"phase"`
		At    time.Time `json:"at"`
		By    string    `json:"by"`
	} `json:"phases"`
}

// Fetch is one running fetch.
type Fetch struct {
	t        testing.TB
	Status   int
	Dispatch string // from the header
	Problem  Line   // of an answer that is no stream
	Lines    []Line // so far
	body     *bufio.Reader
	HangUp   context.CancelFunc // closes the caller's connection
}

// Fetch starts one. When it was refused before it began, Status and Problem tell.
func (a *API) Fetch(t testing.TB, body map[string]any) *Fetch {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	resp := a.Send(t, ctx, http.MethodPost, "/api/fetches", body, "application/x-ndjson")
	t.Cleanup(func() { _ = resp.Body.Close() })
	f := &Fetch{t: t, Status: resp.StatusCode, Dispatch: resp.Header.Get("Runbus-Dispatch-Id"), HangUp: cancel, body: bufio.NewReaderSize(resp.Body, 1<<20)}
	if resp.StatusCode != http.StatusOK {
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		var p struct {
			Line
			Detail string `json:"detail"`
		}
		if err := json.Unmarshal(b, &p); err != nil {
			t.Fatalf("%d %s: %v", resp.StatusCode, b, err)
		}
		f.Problem = p.Line
		f.Problem.Message = p.Detail
	}
	return f
}

// Await reads up to and with the next line of this type.
func (f *Fetch) Await(kind string) Line {
	f.t.Helper()
	for {
		raw, err := f.body.ReadBytes('\n')
		if err != nil {
			f.t.Fatalf("waiting for a line of type %s: %v; so far %+v", kind, err, f.Lines)
		}
		var l Line
		if err := json.Unmarshal(raw, &l); err != nil {
			f.t.Fatalf("%s: %v", raw, err)
		}
		f.Lines = append(f.Lines, l)
		if l.Type == kind {
			return l
		}
		if l.Type == "error" || l.Type == "result" {
			f.t.Fatalf("the fetch ended with %+v before a line of type %s", l, kind)
		}
	}
}

// End reads to the last line, result or error, or returns the problem.
func (f *Fetch) End() Line {
	f.t.Helper()
	if f.Status != http.StatusOK {
		return f.Problem
	}
	for {
		raw, err := f.body.ReadBytes('\n')
		if err != nil {
			f.t.Fatalf("waiting for the outcome: %v; so far %+v", err, f.Lines)
		}
		var l Line
		if err := json.Unmarshal(raw, &l); err != nil {
			f.t.Fatalf("%s: %v", raw, err)
		}
		f.Lines = append(f.Lines, l)
		if l.Type == "error" || l.Type == "result" {
			return l
		}
	}
}
