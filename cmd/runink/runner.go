package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/cmd/internal/process"
)

// runnerCommand is everything on runners.
func runnerCommand() *cli.Command {
	token := remote("token", "issue a new ticket for a PENDING runner; the one before is revoked", "RUNNER", []cli.Flag{waitFlag(), timeoutFlag()}, func(c *cli.Context) error {
		return issue(c, func(runner string) (string, any) { return runnerPath(runner) + "/token", nil })
	})
	token.Subcommands = []*cli.Command{
		remote("revoke", "revoke an unused ticket by the id of its token", "TOKEN-ID", nil, func(c *cli.Context) error {
			id, err := oneArg(c, "TOKEN-ID")
			if err != nil {
				return err
			}
			if err := do(c, http.MethodDelete, "/api/runner-tokens/"+url.PathEscape(id), nil, nil); err != nil {
				return err
			}
			return say(c, map[string]string{"revoked": id}, "the token %s is revoked", id)
		}),
	}
	return group("runner", "runners of the tenant; RUNNER is an id or a name",
		remote("list", "list the runners; what an outbound one is named, and versions, are their own statements", "", nil, listRunners),
		remote("show", "show one runner, with its certificate, tokens and link", "RUNNER", nil, showRunner),
		remote("create", "create a runner that is dialled, and print the command that starts it", "NAME", []cli.Flag{
			&cli.StringFlag{Name: "address", Usage: "`HOST:PORT` at which the runner listens: an IPv4 address, an [IPv6] address or a DNS name"},
			&cli.StringFlag{Name: "zone", Usage: "where it is, for people"}, labelFlag("a label, `KEY=VALUE`; may be given again"), waitFlag(), timeoutFlag(),
		}, createRunner),
		remote("edit", "change name, address, zone or labels of a dialled runner; its certificate stays valid", "RUNNER", []cli.Flag{
			&cli.StringFlag{Name: "name", Usage: "another name"}, &cli.StringFlag{Name: "address", Usage: "another `HOST:PORT`"},
			&cli.StringFlag{Name: "zone", Usage: "another zone"}, labelFlag("a label, `KEY=VALUE`; may be given again; all others go"),
			&cli.BoolFlag{Name: "no-labels", Usage: "remove all labels", DisableDefaultText: true},
		}, editRunner),
		token,
		remote("revoke", "revoke a dialled runner for good", "RUNNER", nil, func(c *cli.Context) error {
			return changeRunner(c, http.MethodPost, "/revoke", "runner %s is revoked")
		}),
		remote("remove", "forget a REVOKED runner: the name of a dialled one is free again, an outbound one (ORG_ADMIN) is off the list", "RUNNER", nil, func(c *cli.Context) error {
			runner, err := oneArg(c, "RUNNER")
			if err != nil {
				return err
			}
			if err := do(c, http.MethodDelete, runnerPath(runner), nil, nil); err != nil {
				return err
			}
			return say(c, map[string]string{"removed": runner}, "runner %s is removed", runner)
		}),
		remote("connect", "have a runner dialled now", "RUNNER", []cli.Flag{waitFlag(), timeoutFlag()}, connectRunner),
		remote("health", "ask a connected runner about its own process", "RUNNER", nil, runnerHealth),
		remote("release", "free the id of an outbound runner for another service-account key (ORG_ADMIN)", "ID", nil, func(c *cli.Context) error {
			id, err := oneArg(c, "ID")
			if err != nil {
				return err
			}
			if err := do(c, http.MethodPost, runnerPath(id)+"/release", nil, nil); err != nil {
				return err
			}
			return say(c, map[string]string{"released": id}, "the id %s is free: the next key that says hello with it holds it", id)
		}),
	)
}

func runnerPath(idOrName string) string { return "/api/runners/" + url.PathEscape(idOrName) }

func labelFlag(usage string) cli.Flag { return &cli.StringSliceFlag{Name: "label", Usage: usage} }

func waitFlag() cli.Flag {
	return &cli.BoolFlag{Name: "wait", Usage: "wait until it takes work", DisableDefaultText: true}
}

func timeoutFlag() cli.Flag {
	return &cli.DurationFlag{Name: "timeout", Usage: "how long --wait waits", Value: 15 * time.Minute}
}

// validWait refuses a wait that would not be one.
func validWait(c *cli.Context) error {
	if c.Duration("timeout") <= 0 {
		return usagef("--timeout %s: use a time above zero", c.Duration("timeout"))
	}
	return nil
}

// runnerRow is what the tables show of a runner.
type runnerRow struct {
	ID      string            `json:"id"`
	Name    string            `json:"name"`
	Display string            `json:"displayName"`
	State   string            `json:"state"`
	About   string            `json:"description"`
	Link    string            `json:"link"`
	Address string            `json:"address"`
	Zone    string            `json:"zone"`
	Labels  map[string]string `json:"labels"`
	Claim   struct {
		Version string `json:"version"`
	} `json:"claims"`
	Health struct {
		Connected    bool       `json:"connected"`
		Dispatchable bool       `json:"dispatchable"`
		Detail       string     `json:"detail"`
		LastSeen     *time.Time `json:"lastSeen"`
		CertNotAfter *time.Time `json:"certNotAfter"`
		InFlight     int        `json:"inFlight"`
		Limit        int        `json:"limit"`
		Signals      struct {
			Connection string `json:"connection"`
			Heartbeat  string `json:"heartbeat"`
			Responders string `json:"responders"`
		} `json:"signals"`
	} `json:"health"`
	Dial *struct {
		Connected bool       `json:"connected"`
		Since     *time.Time `json:"since"`
		PeerAddr  string     `json:"peerAddr"`
		LastError string     `json:"lastError"`
		NextTry   *time.Time `json:"nextTry"`
	} `json:"dial"`
	CreatedBy string        `json:"createdBy"`
	Leaf      *leafRow      `json:"certificate"`
	Next      *leafRow      `json:"nextCertificate"`
	Tokens    []runnerToken `json:"tokens"`
}

type leafRow struct {
	Fingerprint string    `json:"fingerprint"`
	NotAfter    time.Time `json:"notAfter"`
}

type runnerToken struct {
	ID        string    `json:"id"`
	State     string    `json:"state"`
	ExpiresAt time.Time `json:"expiresAt"`
}

func (r runnerRow) takes() string {
	if r.Health.Dispatchable {
		return "yes"
	}
	return "no: " + r.Health.Detail
}

func (r runnerRow) signals() string {
	return r.Health.Signals.Connection + "/" + r.Health.Signals.Heartbeat + "/" + r.Health.Signals.Responders
}

func listRunners(c *cli.Context) error {
	var raw []json.RawMessage
	if err := get(c, chosen, "/api/runners", &raw); err != nil {
		return err
	}
	if c.Bool("json") {
		return printJSON(c.App.Writer, raw)
	}
	rows := make([]runnerRow, len(raw))
	for i, b := range raw {
		if err := json.Unmarshal(b, &rows[i]); err != nil {
			return fmt.Errorf("read the list: %w", err)
		}
	}
	header := []string{"ID", "NAME", "STATE", "LINK", "ADDRESS", "TAKES WORK", "WORKS", "LINK/HEARTBEAT/RESPONDERS", "LAST SEEN", "VERSION"}
	return show(c, rows, header, func(r runnerRow) []any {
		return []any{
			r.ID, r.Display, r.State, r.Link, r.Address, r.takes(), fmt.Sprintf("%d/%d", r.Health.InFlight, r.Health.Limit),
			r.signals(), ago(r.Health.LastSeen, time.Now()), r.Claim.Version,
		}
	})
}

func showRunner(c *cli.Context) error {
	runner, err := oneArg(c, "RUNNER")
	if err != nil {
		return err
	}
	var raw json.RawMessage
	if err := do(c, http.MethodGet, runnerPath(runner), nil, &raw); err != nil {
		return err
	}
	if c.Bool("json") {
		return printJSON(c.App.Writer, raw)
	}
	var r runnerRow
	if err := json.Unmarshal(raw, &r); err != nil {
		return fmt.Errorf("read the runner: %w", err)
	}
	return showFields(c, r.fields(time.Now()))
}

// field is one line of what describes a thing.
type field struct{ name, value string }

func (r runnerRow) fields(now time.Time) []field {
	all := []field{
		{"id", r.ID}, {"name", r.Display}, {"state", strings.TrimSuffix(r.State+": "+r.About, ": ")}, {"link", r.Link}, {"address", r.Address},
		{"zone", r.Zone}, {"labels", labelText(r.Labels)}, {"created by", r.CreatedBy}, {"takes work", r.takes()},
		{"works", fmt.Sprintf("%d of %d", r.Health.InFlight, r.Health.Limit)}, {"signals", "link " + strings.NewReplacer("/", ", ").Replace(r.signals())},
		{"last seen", ago(r.Health.LastSeen, now)}, {"version", r.Claim.Version},
	}
	if r.Leaf != nil {
		all = append(all, field{"certificate", fmt.Sprintf("until %s, SHA-256 %s", stamp(r.Leaf.NotAfter), r.Leaf.Fingerprint)})
	}
	if r.Next != nil {
		all = append(all, field{"next certificate", fmt.Sprintf("until %s, SHA-256 %s", stamp(r.Next.NotAfter), r.Next.Fingerprint)})
	}
	if d := r.Dial; d != nil {
		if d.Connected {
			all = append(all, field{"dialled", fmt.Sprintf("linked to %s, %s", d.PeerAddr, ago(d.Since, now))})
		}
		if d.LastError != "" { // with a link: of the one that is to take its place
			all = append(all, field{"last dial", "failed: " + d.LastError})
		}
	}
	for _, t := range r.Tokens {
		all = append(all, field{"token", fmt.Sprintf("%s, %s, until %s", t.ID, t.State, stamp(t.ExpiresAt))})
	}
	return all
}

func labelText(labels map[string]string) string {
	pairs := make([]string, 0, len(labels))
	for key, value := range labels {
		pairs = append(pairs, key+"="+value)
	}
	slices.Sort(pairs)
	return strings.Join(pairs, " ")
}

// labels reads the --label flags; nil if there are none.
func labels(c *cli.Context) (map[string]string, error) {
	given := c.StringSlice("label")
	if len(given) == 0 {
		return nil, nil
	}
	all := make(map[string]string, len(given))
	for _, pair := range given {
		key, value, ok := strings.Cut(pair, "=")
		if !ok || key == "" {
			return nil, usagef("--label %q is not KEY=VALUE", pair)
		}
		if _, twice := all[key]; twice {
			return nil, usagef("--label %s is given twice", key)
		}
		all[key] = value
	}
	return all, nil
}

func createRunner(c *cli.Context) error {
	return issue(c, func(name string) (string, any) { return "/api/runners", map[string]any{"name": name} })
}

// issue asks for a ticket and prints the command that uses it.
func issue(c *cli.Context, request func(runner string) (path string, body any)) error {
	what := strings.TrimSpace(c.Command.ArgsUsage)
	runner, err := oneArg(c, what)
	if err != nil {
		return err
	}
	if err := validWait(c); err != nil {
		return err
	}
	path, body := request(runner)
	if fields, ok := body.(map[string]any); ok {
		if c.String("address") == "" {
			return usageHint("runink runner create --address HOST:PORT "+runner, "--address is missing: where the runner listens")
		}
		given, err := labels(c)
		if err != nil {
			return err
		}
		fields["address"], fields["zone"] = c.String("address"), c.String("zone")
		if given != nil {
			fields["labels"] = given
		}
	}
	_, api, err := connectAs(c, chosen)
	if err != nil {
		return err
	}
	var raw json.RawMessage
	if err := api.call(c.Context, http.MethodPost, path, body, &raw); err != nil {
		return err
	}
	var made struct {
		Runner    runnerRow `json:"runner"`
		Command   string    `json:"command"`
		Warning   string    `json:"warning"`
		ExpiresAt time.Time `json:"expiresAt"`
	}
	if err := json.Unmarshal(raw, &made); err != nil {
		return fmt.Errorf("read the ticket: %w", err)
	}
	if c.Bool("json") {
		err = printJSON(c.App.Writer, raw)
	} else {
		_, err = fmt.Fprintf(c.App.Writer, "runner %s (%s) is %s. Run this on its host until %s:\n\n%s\n\nThe ticket in it is shown this once, is not stored, and works once.\n",
			oneLine(made.Runner.Name), oneLine(made.Runner.ID), oneLine(made.Runner.State), stamp(made.ExpiresAt), process.Printable(made.Command))
	}
	if !c.Bool("json") {
		warn(c, made.Warning)
	}
	if err != nil || !c.Bool("wait") {
		return err
	}
	return awaitRunner(c, api, made.Runner.ID)
}

// warn tells on standard error what is odd, if anything is.
func warn(c *cli.Context, text string) {
	if text != "" {
		_, _ = fmt.Fprintln(c.App.ErrWriter, "warning: "+oneLine(text))
	}
}

func editRunner(c *cli.Context) error {
	runner, err := oneArg(c, "RUNNER")
	if err != nil {
		return err
	}
	body := map[string]any{}
	for _, name := range []string{"name", "address", "zone"} {
		if c.IsSet(name) {
			body[name] = c.String(name)
		}
	}
	given, err := labels(c)
	switch {
	case err != nil:
		return err
	case given != nil && c.Bool("no-labels"):
		return usagef("--label and --no-labels exclude each other")
	case given != nil:
		body["labels"] = given
	case c.Bool("no-labels"):
		body["labels"] = map[string]string{}
	}
	if len(body) == 0 {
		return usagef("nothing to change: give --name, --address, --zone, --label or --no-labels")
	}
	var raw json.RawMessage
	if err := do(c, http.MethodPatch, runnerPath(runner), body, &raw); err != nil {
		return err
	}
	if err := sayRunner(c, raw, "runner %s is changed"); err != nil || c.Bool("json") {
		return err
	}
	var changed struct {
		Warning string `json:"warning"`
	}
	if err := json.Unmarshal(raw, &changed); err != nil {
		return fmt.Errorf("read the runner: %w", err)
	}
	warn(c, changed.Warning)
	return nil
}

// changeRunner makes one change that takes no body, and says so.
func changeRunner(c *cli.Context, method, what, text string) error {
	runner, err := oneArg(c, "RUNNER")
	if err != nil {
		return err
	}
	var raw json.RawMessage
	if err := do(c, method, runnerPath(runner)+what, nil, &raw); err != nil {
		return err
	}
	return sayRunner(c, raw, text)
}

// sayRunner prints a runner as the API answered, or a sentence with its name.
func sayRunner(c *cli.Context, raw json.RawMessage, text string) error {
	var r runnerRow
	if err := json.Unmarshal(raw, &r); err != nil {
		return fmt.Errorf("read the runner: %w", err)
	}
	return say(c, raw, text, r.Name)
}

func connectRunner(c *cli.Context) error {
	runner, err := oneArg(c, "RUNNER")
	if err != nil {
		return err
	}
	if err := validWait(c); err != nil {
		return err
	}
	_, api, err := connectAs(c, chosen)
	if err != nil {
		return err
	}
	var raw json.RawMessage
	if err := api.call(c.Context, http.MethodPost, runnerPath(runner)+"/connect", nil, &raw); err != nil {
		return err
	}
	if err := sayRunner(c, raw, "the control plane dials runner %s now; `runink runner show` tells how it went"); err != nil || !c.Bool("wait") {
		return err
	}
	return awaitRunner(c, api, runner)
}

func runnerHealth(c *cli.Context) error {
	runner, err := oneArg(c, "RUNNER")
	if err != nil {
		return err
	}
	var raw json.RawMessage
	if err := do(c, http.MethodGet, runnerPath(runner)+"/health", nil, &raw); err != nil {
		return err
	}
	if c.Bool("json") {
		return printJSON(c.App.Writer, raw)
	}
	var h struct {
		InFlight    int        `json:"inFlight"`
		Limit       int        `json:"limit"`
		MemoryBytes *int64     `json:"memoryBytes"`
		Goroutines  int        `json:"goroutines"`
		StartedAt   *time.Time `json:"startedAt"`
		Unmeasured  []string   `json:"unmeasured"`
		Source      string     `json:"source"`
	}
	if err := json.Unmarshal(raw, &h); err != nil {
		return fmt.Errorf("read the health: %w", err)
	}
	fields := []field{{"says", h.Source}, {"works", fmt.Sprintf("%d of %d", h.InFlight, h.Limit)}, {"goroutines", strconv.Itoa(h.Goroutines)}, {"started", ago(h.StartedAt, time.Now())}}
	if h.MemoryBytes != nil {
		fields = append(fields, field{"memory", size(*h.MemoryBytes)})
	}
	return showFields(c, append(fields, field{"not measured", strings.Join(h.Unmeasured, ", ")}))
}

// showFields prints what describes one thing, a line a field; empty ones are left out.
func showFields(c *cli.Context, fields []field) error {
	widest := 0
	for _, f := range fields {
		widest = max(widest, len(f.name))
	}
	var text strings.Builder
	for _, f := range fields {
		if f.value != "" {
			fmt.Fprintf(&text, "%-*s  %s\n", widest, f.name, oneLine(f.value))
		}
	}
	_, err := fmt.Fprint(c.App.Writer, text.String())
	return err
}
