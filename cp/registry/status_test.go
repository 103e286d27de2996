package registry

import (
	"testing"
	"time"

	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/schemas"
)

// Each signal by itself takes a runner off the list of who gets work, and the list says which one.
func TestStatus(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	fit := func() *runner {
		return &runner{
			live: true, links: processLinks{{"n1", link{at: now}}},
			rec: Record{ProcessNonce: "n1", Session: "s1", Ready: true, LastSeen: now.Add(-10 * time.Second)},
		}
	}
	for name, c := range map[string]struct {
		change    func(*runner)
		connected bool
		offline   string
		signals   Signals
	}{
		"fit":               {func(*runner) {}, true, "", Signals{"up", "fresh", "not asked"}},
		"key gone":          {func(r *runner) { r.live = false }, false, "not connected", Signals{"down", "none", "not asked"}},
		"said goodbye":      {func(r *runner) { r.rec.Left = true }, false, "not connected", Signals{"down", "none", "not asked"}},
		"no link":           {func(r *runner) { r.links = nil }, false, "not connected", Signals{"down", "fresh", "not asked"}},
		"another's link":    {func(r *runner) { r.links = processLinks{{nonce: "n2"}} }, false, "not connected", Signals{"down", "fresh", "not asked"}},
		"no heartbeat yet":  {func(r *runner) { r.rec.Ready = false }, true, "no heartbeat yet", Signals{"up", "none", "not asked"}},
		"heartbeat is late": {func(r *runner) { r.rec.LastSeen = now.Add(-46 * time.Second) }, false, "no heartbeat for 46s", Signals{"up", "late", "not asked"}},
		"nobody listened":   {func(r *runner) { r.responders = responders{session: "s1", none: true, at: now.Add(time.Second)} }, true, "", Signals{"up", "fresh", "none"}},
		"linked anew since": {func(r *runner) { r.responders = responders{session: "s1", none: true, at: now.Add(-time.Second)} }, true, "", Signals{"up", "fresh", "not asked"}},
		"another session's": {func(r *runner) { r.responders = responders{session: "s0", none: true, at: now.Add(time.Second)} }, true, "", Signals{"up", "fresh", "not asked"}},
		"heard":             {func(r *runner) { r.responders = responders{session: "s1", at: now} }, true, "", Signals{"up", "fresh", "heard"}},
		"draining":          {func(r *runner) { r.rec.Draining = true }, true, "draining", Signals{"up", "fresh", "not asked"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := fit()
			c.change(r)
			got := r.status(now)
			if got.connected != c.connected || got.offline != c.offline || got.signals != c.signals {
				t.Errorf("status = %+v, want connected %v, offline %q, signals %+v", got, c.connected, c.offline, c.signals)
			}
		})
	}
}

// What is shown of a runner whose link is gone is not what was true of that link; what dispatch goes by stays.
func TestSignalsOfALinkThatIsGone(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	for name, c := range map[string]struct {
		change            func(*runner)
		outbound, dialled Signals
	}{
		"linked":   {func(*runner) {}, Signals{"up", "fresh", "heard"}, Signals{"up", "fresh", "heard"}},
		"cut":      {func(r *runner) { r.links = nil }, Signals{"down", "fresh", "not asked"}, Signals{"down", "none", "not asked"}},
		"late":     {func(r *runner) { r.links = nil; r.rec.LastSeen = now.Add(-time.Minute) }, Signals{"down", "late", "not asked"}, Signals{"down", "late", "not asked"}},
		"ended":    {func(r *runner) { r.rec.Left = true }, Signals{"down", "none", "not asked"}, Signals{"down", "none", "not asked"}},
		"long ago": {func(r *runner) { r.live = false }, Signals{"down", "none", "not asked"}, Signals{"down", "none", "not asked"}},
	} {
		t.Run(name, func(t *testing.T) {
			rn := &runner{
				ref: schemas.RunnerRef{Tenant: "acme", Runner: "edge"}, live: true, links: processLinks{{"n1", link{at: now}}},
				rec: Record{ProcessNonce: "n1", Session: "s1", Ready: true, LastSeen: now}, responders: responders{session: "s1", at: now},
			}
			c.change(rn)
			s := rn.seen(now)
			if got := s.runner().Health.Signals; got != c.outbound {
				t.Errorf("an outbound one shows %+v", got)
			}
			for _, state := range []roster.State{roster.Active, roster.Revoked} {
				s.dialled = &roster.Runner{ID: "edge", Name: "edge", State: state}
				if got := s.runner().Health.Signals; got != c.dialled {
					t.Errorf("a dialled one that is %s shows %+v", state, got)
				}
			}
		})
	}
}

// What a scan says replaces what events said, but not what they said since it began.
func TestScan(t *testing.T) {
	start := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	conn := func(cid uint64, runner, nonce string) clientInfo {
		return clientInfo{CID: cid, Auth: "acme/" + runner, Name: runner + "/" + nonce, Start: start}
	}
	r := &Registry{
		d:     Deps{Now: func() time.Time { return start.Add(time.Minute) }, Grace: time.Minute},
		fleet: make(map[string]map[string]*runner), changed: make(chan struct{}), ended: make(map[linkKey]time.Time),
	}
	began := start.Add(30 * time.Second)
	add := func(id, nonce, server string, cid uint64, at time.Time) {
		rn := r.runner(conn(cid, id, nonce).mustRef(t))
		rn.links.set(nonce, link{key: linkKey{server, cid}, at: at, start: start})
	}
	add("gone", "n", "S1", 1, start)                 // its end was missed
	add("new", "n", "S1", 2, began.Add(time.Second)) // came during the scan
	add("silent", "n", "S2", 3, start)               // its server doesn't answer
	add("stays", "n", "S1", 4, start)                //
	r.ended[linkKey{"S1", 6}] = time.Now()           // ended during the scan, or so short before it that its server still lists it
	servers := map[string][]clientInfo{"S1": {
		conn(4, "stays", "n"), conn(5, "missed", "n"), conn(6, "ended", "n"),
		{CID: 7, Auth: "UABC", Name: "dispatch"}, {CID: 8, Auth: "acme/stays", Name: "other/n"},
	}}
	linked := func() map[string]bool {
		have := make(map[string]bool)
		for id, rn := range r.fleet["acme"] {
			if len(rn.links) > 0 {
				have[id] = true
			}
		}
		return have
	}
	r.applyScan(servers, began)
	want := map[string]bool{"new": true, "silent": true, "stays": true, "missed": true}
	for id := range r.fleet["acme"] {
		if linked()[id] != want[id] {
			t.Errorf("after one scan %s linked = %v, want %v", id, linked()[id], want[id])
		}
	}
	r.applyScan(servers, began)
	if linked()["silent"] {
		t.Error("the links of a server that missed two scans still count")
	}
}

// Each replica's server tells of its own links, in an order of its own: a link that is heard of late does not take the place of a newer one
// of the same process. Clocks may differ, so whether it goes on is looked for when the newer one ends.
func TestAnOlderLinkIsNoNewOne(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	r := &Registry{
		d:     Deps{Now: func() time.Time { return now }},
		fleet: make(map[string]map[string]*runner), changed: make(chan struct{}), ended: make(map[linkKey]time.Time), rescan: make(chan struct{}, 1),
	}
	event := func(server string, start time.Time) (e linkEvent) {
		e.Server.ID, e.Client = server, clientInfo{ID: 1, CID: 1, User: "acme/edge", Name: "edge/n", Start: start}
		return e
	}
	ref := event("S1", now).Client.mustRef(t)
	at := func() string {
		if rn := r.fleet[ref.Tenant][ref.Runner]; rn != nil {
			if l, linked := rn.links.of("n"); linked {
				return l.key.server
			}
		}
		return "none"
	}
	for i, step := range []struct {
		hear func(linkEvent)
		e    linkEvent
		want string
		scan int
	}{
		{r.linkUp, event("S2", now.Add(time.Second)), "S2", 0},
		{r.linkUp, event("S1", now), "S2", 0},
		{r.linkDown, event("S1", now), "S2", 0},
		{r.linkUp, event("S3", now.Add(time.Minute)), "S3", 0},
		{r.linkDown, event("S2", now.Add(time.Second)), "S3", 0},
		{r.linkDown, event("S3", now.Add(time.Minute)), "none", 0},
		{r.linkUp, event("S4", now.Add(time.Minute)), "S4", 0},
		{r.linkUp, event("S5", now), "S4", 0}, // by a clock that is behind
		{r.linkDown, event("S4", now.Add(time.Minute)), "none", 1},
	} {
		if step.hear(step.e); at() != step.want || len(r.rescan) != step.scan {
			t.Fatalf("step %d: the link is at %s, not %s; %d scans are asked for", i+1, at(), step.want, len(r.rescan))
		}
	}
	r.applyScan(map[string][]clientInfo{"S5": {event("S5", now).Client}}, now)
	if at() != "S5" {
		t.Errorf("after the scan the link is at %s", at())
	}
	<-r.rescan
	r.linkUp(event("S6", now.Add(time.Minute)))
	for range suspectMost { // its server is gone; the clock of the next one is behind
		r.applyScan(map[string][]clientInfo{"S7": {event("S7", now).Client}}, now.Add(time.Second))
	}
	if at() != "none" || len(r.rescan) != 1 {
		t.Errorf("the link is at %s, %d scans are asked for", at(), len(r.rescan))
	}
}

// The begins and the ends of links are heard of by two goroutines, and a link that has ended is listed until its server has cleared it
// away: neither brings it back. What a scan has found before its begin is heard of stays as it is.
func TestWhatIsHeardOfALinkLate(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	r := &Registry{
		d:     Deps{Now: func() time.Time { return now }},
		fleet: make(map[string]map[string]*runner), changed: make(chan struct{}), ended: make(map[linkKey]time.Time),
	}
	event := func(cid uint64, nonce string) (e linkEvent) {
		e.Server.ID, e.Client = "S1", clientInfo{ID: cid, CID: cid, User: "acme/edge", Name: "edge/" + nonce, Start: now}
		return e
	}
	ref := event(1, "n").Client.mustRef(t)
	link := func(nonce string) (link, bool) {
		if rn := r.fleet[ref.Tenant][ref.Runner]; rn != nil {
			return rn.links.of(nonce)
		}
		return link{}, false
	}
	r.linkDown(event(1, "n"))
	r.linkUp(event(1, "n"))
	if l, linked := link("n"); linked {
		t.Errorf("linked by a begin that is heard of after the end: %+v", l)
	}
	r.linkUp(event(2, "n"))
	r.linkDown(event(2, "n"))
	r.applyScan(map[string][]clientInfo{"S1": {event(1, "n").Client, event(2, "n").Client, event(3, "found").Client}}, now)
	if l, linked := link("n"); linked {
		t.Errorf("linked by a list with what has ended: %+v", l)
	}
	now = now.Add(time.Second)
	r.linkUp(event(3, "found"))
	if l, linked := link("found"); !linked || !l.at.Equal(now.Add(-time.Second)) {
		t.Errorf("what a scan has found is %+v, %v", l, linked)
	}
	r.linkUp(event(4, "found"))
	if l, _ := link("found"); l.key != (linkKey{"S1", 4}) || !l.at.Equal(now) {
		t.Errorf("the next link is %+v", l)
	}
}

func (c clientInfo) mustRef(t *testing.T) schemas.RunnerRef {
	t.Helper()
	ref, _, ok := c.runner()
	if !ok {
		t.Fatalf("%+v is no runner's connection", c)
	}
	return ref
}
