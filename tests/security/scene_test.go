package security

import (
	"bufio"
	"bytes"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
	"github.com/org-runink/runbus/tests/stack"
)

// scene is a control plane with runners a1 (the intruder, over whatever link) and a2 of tenant A, and b1 of tenant B, and everybody who may
// listen anywhere: what an intruder's message reaches, one of them gets.
type scene struct {
	bench
	plane      *stack.Plane
	link       stack.Link // of a1
	a1, a2, b1 *runner
	beaten     time.Time // their last heartbeats
	publishers map[from]*client
	watchers   []*watcher
	round      int
}

// watcher is a connection that listens to all its user may listen to, in one channel.
type watcher struct {
	name string
	conn *client
	got  chan *nats.Msg
	// marker is the subject of the n-th marker, and by who sends it.
	marker func(n int) string
	by     *client
	// noisy is what the control plane's own work is heard on too: a prefix of subjects, "" for all; nil for none.
	noisy *string
}

func newScene(t *testing.T, link stack.Link) *scene {
	t.Helper()
	plane := stack.StartPlane(t, true, nil)
	s := &scene{bench: benchOf(plane), plane: plane, link: link}
	tenantB := newTenant(t, plane, "tenant-b")
	_, key2 := plane.Admin.MintKey(t, "a2")
	_, keyB := tenantB.MintKey(t, "b1")
	s.a1, s.a2, s.b1 = linked(t, plane, link, "a1"), s.runner(t, key2, "a2"), s.runner(t, keyB, "b1")
	plane.Admin.AwaitRunner(t, s.a1.ref.Runner, true) // their first heartbeats have come
	plane.Admin.AwaitRunner(t, "a2", true)
	tenantB.AwaitRunner(t, "b1", true)
	s.beaten = time.Now()
	serve, dispatch, micro := s.privileged(t, "serve"), s.privileged(t, "dispatch"), s.privileged(t, "micro")
	sec, sys, ops := s.privileged(t, "sec"), s.privileged(t, "sys"), s.privileged(t, "ops")
	s.publishers = map[from]*client{byServe: serve, byOther: s.a2.client, byB: s.b1.client, bySec: sec, bySys: sys, byOps: ops}

	for _, r := range []*runner{s.a1, s.a2, s.b1} {
		s.watch(t, &watcher{name: r.ref.Runner, conn: r.client, by: serve, marker: func(n int) string {
			return schemas.InboxPrefix(r.ref) + ".marker" + strconv.Itoa(n)
		}}, own(r.ref, "work.*"), own(r.ref, "control.*"), own(r.ref, "credit.*"), own(r.ref, "inbox.>"))
	}
	reply := func(n int) string { return schemas.ReplySubject(s.a2.ref, "marker", strconv.Itoa(n)) }
	s.watch(t, &watcher{name: "serve", conn: serve, by: s.a2.client, marker: reply},
		schemas.AllHellos, schemas.AllHeartbeats, schemas.AllGoodbyes, "runbus.v1.*.runner.*.reply.>")
	s.watch(t, &watcher{name: "dispatch", conn: dispatch, by: s.a2.client, marker: reply},
		"runbus.v1.*.runner.*.result.>", "runbus.v1.*.runner.*.reply.>", "_INBOX.>")
	s.watch(t, &watcher{name: "ops", conn: ops, by: s.a2.client, marker: reply, noisy: new("_INBOX.")}, "runbus.v1.>", "_INBOX.>")
	s.watch(t, &watcher{name: "micro", conn: micro, by: ops, marker: func(n int) string { return "runbus.ops.marker" + strconv.Itoa(n) }},
		"$SRV.PING", "$SRV.INFO", "$SRV.STATS", "runbus.ops.*")
	s.watch(t, &watcher{name: "SEC", conn: sec, by: sec, noisy: new(""), marker: func(n int) string { return "marker." + strconv.Itoa(n) }}, ">")
	s.watch(t, &watcher{name: "SYS", conn: sys, by: sys, noisy: new(""), marker: func(n int) string { return "marker." + strconv.Itoa(n) }}, ">")
	return s
}

// newTenant makes a tenant with the operator's token from the data folder and returns the API as its admin.
func newTenant(t *testing.T, plane *stack.Plane, name string) *stack.API {
	t.Helper()
	operator := &stack.API{URL: plane.HTTP, Token: stack.ReadToken(t, filepath.Join(plane.DataDir, "operator.token"))}
	var made struct{ Token string }
	operator.Must(t, http.MethodPost, "/api/tenants", map[string]string{"name": name}, &made)
	return &stack.API{URL: plane.HTTP, Token: made.Token}
}

// own is a subject under a runner's prefix.
func own(ref schemas.RunnerRef, rest string) string {
	return strings.TrimSuffix(schemas.InboxPrefix(ref), "inbox") + rest
}

func (s *scene) watch(t *testing.T, w *watcher, subjects ...string) {
	t.Helper()
	w.got = make(chan *nats.Msg, 1<<16)
	for _, subject := range subjects {
		if _, err := w.conn.ChanSubscribe(subject, w.got); err != nil {
			t.Fatal(err)
		}
	}
	w.conn.quiet(t, w.name+" subscribes")
	s.watchers = append(s.watchers, w)
}

// listen sends every watcher its marker and returns what each got before it.
func (s *scene) listen(t *testing.T) map[string][]*nats.Msg {
	t.Helper()
	s.a1.flush(t) // what it did is behind it when the markers are sent
	s.round++
	sent := map[string]bool{}
	for _, w := range s.watchers {
		// One marker may serve several watchers.
		if key := fmt.Sprintf("%p %s", w.by, w.marker(s.round)); !sent[key] {
			sent[key] = true
			if err := w.by.Publish(w.marker(s.round), nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, w := range s.watchers {
		w.by.flush(t)
	}
	got := map[string][]*nats.Msg{}
	for _, w := range s.watchers {
		timeout := time.After(stack.Patience)
		for arrived := false; !arrived; {
			select {
			case m := <-w.got:
				if arrived = m.Subject == w.marker(s.round); !arrived {
					got[w.name] = append(got[w.name], m)
				}
			case <-timeout:
				t.Fatalf("the marker %s did not reach %s", w.marker(s.round), w.name)
			}
		}
	}
	return got
}

// nothing fails the test when anybody got something of the attempt, but for what the watchers in allowed may have got.
func (s *scene) nothing(t *testing.T, got map[string][]*nats.Msg, token string, allowed func(watcher string, m *nats.Msg) bool) {
	t.Helper()
	for _, w := range s.watchers {
		for _, m := range got[w.name] {
			if allowed != nil && allowed(w.name, m) || isHealthPoll(m) {
				continue
			}
			// In SEC and SYS the control plane works, and in OPS it looks after the mirrors: there a message is the intruder's
			// when it is marked so, or is one of the bus.
			if w.noisy != nil && strings.HasPrefix(m.Subject, *w.noisy) && !bytes.Contains(m.Data, []byte(token)) && m.Header.Get(bus.HeaderType) == "" && !strings.Contains(m.Reply, token) {
				continue
			}
			t.Errorf("%s got a message on %q, reply %q, before its marker: %.200q", w.name, m.Subject, m.Reply, m.Data)
		}
	}
}

// read is readStreams, when the record of a link that was made by dialling is there: it ends by itself, and comes back, when the machine
// stood still for longer than it lasts.
func (s *scene) read(t *testing.T) contents {
	t.Helper()
	if s.link == stack.OverDials {
		awaitLease(t, s.publishers[bySec], s.a1.ref.Runner)
	}
	return readStreams(t, s.publishers[bySec])
}

// isHealthPoll tells what the control plane asks a dialled runner every 15 s, whatever an intruder does.
func isHealthPoll(m *nats.Msg) bool {
	order := new(runbusv1.RunnerControl)
	subject, err := schemas.Parse(m.Subject)
	return err == nil && subject.Kind == schemas.KindControl && bus.Decode(m, order) == nil && order.GetHealth() != nil
}

// heartbeats counts those that the control plane is done with, whatever became of them.
const heartbeats = "runbus_registry_heartbeats_total"

// tally is what became of the heartbeats. Those of a session that is not in force are turned down: no runner of a scene sends one. One that
// the store had no time for (`error`) was neither taken in nor turned down.
type tally struct{ done, accepted, turnedDown float64 }

func tallied(t testing.TB, api *stack.API) tally {
	t.Helper()
	text := metrics(t, api)
	result := func(name string) string { return heartbeats + `{result="` + name + `"}` }
	return tally{sum(t, text, heartbeats), sum(t, text, result("ok")), sum(t, text, result("left"), result("replaced"), result("rehello"))}
}

// accept has send send n heartbeats until all of one go are taken in. None may be turned down.
func (s *scene) accept(t *testing.T, n float64, send func()) {
	t.Helper()
	give := time.Now().Add(stack.Patience)
	for before := tallied(t, s.plane.Admin); ; {
		send()
		awaitMetric(t, s.plane.Admin, heartbeats, before.done+n)
		after := tallied(t, s.plane.Admin)
		switch {
		case after.turnedDown != before.turnedDown:
			t.Fatalf("%v heartbeats were turned down", after.turnedDown-before.turnedDown)
		case after.accepted == before.accepted+n:
			return
		case time.Now().After(give):
			t.Fatalf("%v of %v heartbeats are taken in", after.accepted-before.accepted, n)
		}
		before = after
	}
}

// metric is one figure of /metrics, or the sum of all with a name that has no labels; 0 when it isn't there yet.
func metric(t testing.TB, api *stack.API, name string) float64 {
	t.Helper()
	return sum(t, metrics(t, api), name)
}

func metrics(t testing.TB, api *stack.API) []byte {
	t.Helper()
	status, body := api.Call(t, http.MethodGet, "/metrics", nil)
	if status != http.StatusOK {
		t.Fatalf("/metrics: %d", status)
	}
	return body
}

// sum adds up the figures of these names in what /metrics answered; see metric.
func sum(t testing.TB, body []byte, names ...string) float64 {
	t.Helper()
	total := 0.0
	for lines := bufio.NewScanner(bytes.NewReader(body)); lines.Scan(); {
		line := lines.Text()
		if !slices.ContainsFunc(names, func(name string) bool { return strings.HasPrefix(line, name+" ") || strings.HasPrefix(line, name+"{") }) {
			continue
		}
		v, err := strconv.ParseFloat(line[strings.LastIndex(line, " ")+1:], 64)
		if err != nil {
			t.Fatal(err)
		}
		total += v
	}
	return total
}

// awaitMetric asks until the figure is want. A figure is a state, not an event, so it is asked for again after each answer.
func awaitMetric(t testing.TB, api *stack.API, name string, want float64) {
	t.Helper()
	give := time.Now().Add(stack.Patience)
	for {
		v := metric(t, api, name)
		if v == want {
			return
		}
		if v > want || time.Now().After(give) {
			t.Fatalf("%s is %v, want %v", name, v, want)
		}
		<-time.After(2 * time.Millisecond)
	}
}
