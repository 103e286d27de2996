package dispatch_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/org-runink/runbus/cp/dispatch"
	"github.com/org-runink/runbus/cp/registry"
	"github.com/org-runink/runbus/schemas"
)

func fit(id, name string) registry.Candidate {
	return registry.Candidate{Ref: schemas.RunnerRef{Tenant: "acme", Runner: id}, Name: name, Connected: true, Session: "s-" + id}
}

func off(id, name, why string) registry.Candidate {
	c := fit(id, name)
	c.Connected, c.Offline = false, why
	return c
}

func TestSelect(t *testing.T) {
	revoked, pending, draining, sessionless := fit("rev", ""), fit("pend", ""), fit("dr", ""), fit("no", "")
	revoked.Revoked, revoked.Offline = true, "its service-account key was revoked"
	pending.Pending = true
	draining.Draining, draining.Offline = true, "draining"
	sessionless.Session = ""
	fleet := []registry.Candidate{
		fit("edge-1", "berlin"), fit("a.B_c", ""), fit("berlin-id", "edge-1"),
		fit("twin-1", "twin"), fit("twin-2", "twin"),
		off("old-1", "pod", "not connected"), off("old-2", "pod", "not connected"), fit("pod-3", "pod"),
		off("gone-1", "gone", "not connected"), off("gone-2", "gone", "not connected"),
		off("away", "away-name", "not connected"), off("new", "", "no heartbeat yet"),
		revoked, pending, draining, sessionless,
	}
	dialled, managed := off("r-aaaaaaaaaaaaaaaaaaaaaaaaaa", "warehouse", "not connected"), off("console", "console", "not connected")
	dialled.Link, managed.Link = registry.LinkDialled, registry.LinkLocal
	fleet = append(fleet, dialled)
	for _, c := range []struct {
		name string
		id   string
		code schemas.Code
		text string
	}{
		{name: "edge-1", id: "edge-1"}, // an id wins over a name
		{name: "a.B_c", id: "a.B_c"},
		{name: "berlin", id: "edge-1"},
		{name: "pod", id: "pod-3"}, // the one of that name that is there
		{name: "", code: schemas.CodeNoRunner, text: "no runner is selected"},
		{name: "no such", code: schemas.CodeInvalid, text: "not a runner name (a DNS label, or `console` for the Runink managed runner)"},
		{name: "*", code: schemas.CodeInvalid, text: "not a runner name (a DNS label, or `console` for the Runink managed runner)"},
		{name: strings.Repeat("a", 65), code: schemas.CodeInvalid, text: "not a runner name (a DNS label, or `console` for the Runink managed runner)"},
		{name: "nobody", code: schemas.CodeRunnerUnknown, text: `runner "nobody" is not registered`},
		{name: "console", code: schemas.CodeRunnerUnknown, text: `runner "console" is not registered`},
		{name: "twin", code: schemas.CodeInvalid, text: `2 runners are named "twin"`},
		{name: "gone", code: schemas.CodeInvalid, text: `2 runners are named "gone"`},
		{name: "rev", code: schemas.CodeRunnerRevoked, text: `runner "rev" was revoked`},
		{name: "pend", code: schemas.CodeRunnerOffline, text: `runner "pend" is offline: not enrolled yet`},
		{name: "away-name", code: schemas.CodeRunnerOffline, text: `runner "away" is offline: not connected`},
		{name: "new", code: schemas.CodeRunnerOffline, text: `runner "new" is offline: no heartbeat yet`},
		{name: "dr", code: schemas.CodeRunnerOffline, text: `runner "dr" is offline: draining`},
		{name: "warehouse", code: schemas.CodeRunnerOffline, text: `runner "warehouse" is offline: not connected`},
		{name: "no", code: schemas.CodeRunnerOffline, text: `runner "no" is offline: not connected`},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := dispatch.Select(fleet, c.name)
			if c.code == "" {
				if err != nil || got.Ref.Runner != c.id {
					t.Errorf("Select = %q, %v, want %q", got.Ref.Runner, err, c.id)
				}
				return
			}
			if schemas.CodeOf(err) != c.code || err.Error() != c.text {
				t.Errorf("Select: %s %q, want %s %q", schemas.CodeOf(err), err, c.code, c.text)
			}
		})
	}
	for name, want := range map[string]bool{"warehouse": true, "pend": true, "away": false} { // what is dialled has its last error on record
		_, err := dispatch.Select(fleet, name)
		var told *schemas.Error
		if !errors.As(err, &told) || strings.Contains(told.Hint, "`runink runner show "+name+"`") != want {
			t.Errorf("%s: the hint is %q", name, told.Hint)
		}
	}
	if _, err := dispatch.Select(append(fleet, managed), "console"); schemas.CodeOf(err) != schemas.CodeRunnerOffline ||
		err.Error() != "Analysis failed: dedicated runner unreachable — fetch does not run on the control plane: not connected" {
		t.Errorf("the managed runner: %v", err)
	}
	managed = fit("console", "console")
	managed.Link = registry.LinkLocal
	if c, err := dispatch.Select(append(fleet, managed), "console"); err != nil || c.Ref.Runner != "console" {
		t.Errorf("the managed runner that runs: %v", err)
	}
	if _, err := dispatch.Select(nil, "edge-1"); schemas.CodeOf(err) != schemas.CodeRunnerUnknown {
		t.Errorf("of an empty fleet: %v", err)
	}
}
