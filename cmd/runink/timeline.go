package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/cmd/internal/process"
)

// phaseLine is one step of a dispatch's timeline.
type phaseLine struct {
	Phase string    `json:"phase"`
	At    time.Time `json:"at"`
	By    string    `json:"by"`
	Note  string    `json:"note,omitempty"`
}

// printTimeline shows each step: when it came, how long the hop to it took, and who says so.
func printTimeline(w io.Writer, phases []phaseLine) {
	for i, p := range phases {
		hop := ""
		if i > 0 {
			hop = "+" + span(p.At.Sub(phases[i-1].At))
		}
		line := fmt.Sprintf("  %11s %12s  %-12s %s", span(p.At.Sub(phases[0].At)), hop, p.Phase, p.By)
		if p.Note != "" {
			line += "  (" + p.Note + ")"
		}
		_, _ = fmt.Fprintln(w, process.Printable(line))
	}
}

// span is a duration with a unit that fits it.
func span(d time.Duration) string {
	if d < 10*time.Second {
		return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000)
	}
	return d.Round(100 * time.Millisecond).String()
}

// timeline is a dispatch as GET /api/fetches shows it.
type timeline struct {
	DispatchID string      `json:"dispatchId"`
	RunnerID   string      `json:"runnerId"`
	RunnerPID  int64       `json:"runnerPid"`
	Person     string      `json:"person"`
	Source     string      `json:"source"`
	State      string      `json:"state"`
	Outcome    string      `json:"outcome"`
	Code       string      `json:"code"`
	Message    string      `json:"message"`
	Hint       string      `json:"hint"`
	Replica    string      `json:"replica"`
	Session    string      `json:"session"`
	Link       string      `json:"link"`
	TraceID    string      `json:"traceId"`
	Rows       int64       `json:"rows"`
	Bytes      int64       `json:"bytes"`
	StartedAt  time.Time   `json:"startedAt"`
	EndedAt    *time.Time  `json:"endedAt"`
	Phases     []phaseLine `json:"phases"`
	Stopped    *struct {
		From string `json:"from"`
		To   string `json:"to"`
		Why  string `json:"why"`
	} `json:"stopped"`
}

// took is how long it ran, or has run.
func (t timeline) took(now time.Time) time.Duration {
	if t.EndedAt != nil {
		now = *t.EndedAt
	}
	return max(now.Sub(t.StartedAt), 0)
}

func (t timeline) outcome() string {
	if t.State == "running" {
		return t.State
	}
	return t.Outcome
}

func (t timeline) stoppedAt() string {
	if t.Stopped == nil {
		return ""
	}
	return t.Stopped.From + " → " + t.Stopped.To
}

// print shows the whole of it.
func (t timeline) print(w io.Writer, now time.Time) {
	var b strings.Builder
	fmt.Fprintf(&b, "dispatch %s: %s", t.DispatchID, t.outcome())
	if t.State == "running" {
		fmt.Fprintf(&b, " for %s\n", span(t.took(now)))
	} else {
		fmt.Fprintf(&b, " after %s\n", span(t.took(now)))
	}
	show := func(name, value string) {
		if value != "" {
			fmt.Fprintf(&b, "  %-9s %s\n", name, value)
		}
	}
	show("started", t.StartedAt.Local().Format("2006-01-02T15:04:05.000Z07:00"))
	show("by", t.Person)
	show("source", t.Source)
	runner := t.RunnerID
	if t.RunnerPID != 0 {
		runner += fmt.Sprintf(", process %d", t.RunnerPID)
	}
	if t.Link != "" {
		runner += ", link " + t.Link
	}
	show("runner", runner)
	show("session", t.Session)
	show("replica", t.Replica)
	show("trace id", t.TraceID)
	show("result", fmt.Sprintf("%d rows, %s of Arrow", t.Rows, size(t.Bytes)))
	_, _ = fmt.Fprintln(w, process.Printable(b.String()))
	printTimeline(w, t.Phases)
	if t.Stopped == nil {
		return
	}
	_, _ = fmt.Fprintln(w, process.Printable(fmt.Sprintf("\nstopped at %s: %s", t.stoppedAt(), t.Stopped.Why)))
	if t.Message != "" && t.Message != t.Stopped.Why {
		_, _ = fmt.Fprintln(w, process.Printable(t.Code+": "+t.Message))
	}
	if t.Hint != "" {
		_, _ = fmt.Fprintln(w, process.Printable("  → "+t.Hint))
	}
}

func fetchTraceCommand() *cli.Command {
	c := remote("trace", "show the timeline of a fetch, and the hop on which it stopped", "DISPATCH", nil, func(c *cli.Context) error {
		id, err := oneArg(c, "DISPATCH")
		if err != nil {
			return err
		}
		var raw json.RawMessage
		if err := do(c, http.MethodGet, "/api/fetches/"+url.PathEscape(id), nil, &raw); err != nil {
			return err
		}
		if c.Bool("json") {
			return printJSON(c.App.Writer, raw)
		}
		var t timeline
		if err := json.Unmarshal(raw, &t); err != nil {
			return fmt.Errorf("read the timeline: %w", err)
		}
		t.print(c.App.Writer, time.Now())
		return nil
	})
	c.Description = "Each line is a step: when it came since the begin, how long the hop to it took, and who saw it, in the control plane's time."
	return c
}

// outcomes are what --outcome takes.
var outcomes = []string{"running", "completed", "refused", "failed", "cancelled", "deadline", "runner_lost", "outcome_unknown"}

// mostPages bounds how often a list goes on where the server interrupted a search.
const mostPages = 50

func fetchListCommand() *cli.Command {
	return remote("list", "list the fetches of the last day: those that run, then the newest", "", []cli.Flag{
		&cli.StringFlag{Name: "runner", Usage: "only those of this runner, by its `ID` or a dialled one's name"},
		&cli.StringFlag{Name: "outcome", Usage: "only `OUTCOME`: running, completed, refused, failed, cancelled, deadline, runner_lost or outcome_unknown"},
		&cli.IntFlag{Name: "limit", Value: 50, Usage: "fetches at most (1-1000)"},
	}, func(c *cli.Context) error {
		if err := noArgs(c); err != nil {
			return err
		}
		if o := c.String("outcome"); o != "" && !slices.Contains(outcomes, o) {
			return usagef("--outcome %s: use %s", o, strings.Join(outcomes, ", "))
		}
		limit := c.Int("limit")
		if limit < 1 || limit > 1000 {
			return usagef("--limit %d: use 1 to 1000", limit)
		}
		query := url.Values{}
		for _, name := range []string{"runner", "outcome"} {
			if v := c.String(name); v != "" {
				query.Set(name, v)
			}
		}
		_, api, err := connectAs(c, chosen)
		if err != nil {
			return err
		}
		raw, err := listFetches(c, api, query, limit)
		if err == nil && len(raw) == 0 && query.Get("runner") != "" {
			raw, err = listByName(c, api, query, limit)
		}
		if err != nil {
			return err
		}
		if c.Bool("json") {
			return printJSON(c.App.Writer, raw)
		}
		rows := make([]timeline, len(raw))
		for i, b := range raw {
			if err := json.Unmarshal(b, &rows[i]); err != nil {
				return fmt.Errorf("read the list: %w", err)
			}
		}
		now, names := time.Now(), runnerNames(c, api)
		return show(c, rows, []string{"DISPATCH", "STARTED", "RUNNER ID", "RUNNER NAME", "SOURCE", "BY", "OUTCOME", "TOOK", "ROWS", "STOPPED AT"}, func(t timeline) []any {
			return []any{
				t.DispatchID, stamp(t.StartedAt), t.RunnerID, names[t.RunnerID], t.Source, t.Person, t.outcome(), span(t.took(now)), t.Rows, t.stoppedAt(),
			}
		})
	})
}

// runnerNames are the names of the tenant's runners by id, as they are now. It is empty where they can't be read: what was fetched is seen
// without the registry too.
func runnerNames(c *cli.Context, api *client) map[string]string {
	var runners []runnerRow
	if err := api.call(c.Context, http.MethodGet, "/api/runners", nil, &runners); err != nil {
		return nil
	}
	names := make(map[string]string, len(runners))
	for _, r := range runners {
		names[r.ID] = r.Display
	}
	return names
}

// listByName lists the fetches of the runner that the query names where there were none of that id: of an outbound one the list knows the
// id alone. A runner that is not there is an error: no fetches of it would look as if it had done nothing.
func listByName(c *cli.Context, api *client, query url.Values, limit int) ([]json.RawMessage, error) {
	var r runnerRow
	if err := api.call(c.Context, http.MethodGet, runnerPath(query.Get("runner")), nil, &r); err != nil {
		return nil, err
	}
	if r.ID == query.Get("runner") {
		return []json.RawMessage{}, nil
	}
	query.Set("runner", r.ID)
	query.Del("before")
	return listFetches(c, api, query, limit)
}

// listFetches reads pages until there are limit fetches, or no more.
func listFetches(c *cli.Context, api *client, query url.Values, limit int) ([]json.RawMessage, error) {
	all := []json.RawMessage{}
	for range mostPages {
		query.Set("limit", strconv.Itoa(limit-len(all)))
		page, next, err := api.page(c.Context, "/api/fetches?"+query.Encode())
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		if next.Get("before") == "" || len(all) >= limit {
			break
		}
		query.Set("before", next.Get("before"))
	}
	return all, nil
}
