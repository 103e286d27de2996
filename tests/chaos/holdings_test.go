package chaos

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/tests/stack"
)

// holdings is what a process holds that could leak.
type holdings struct{ goroutines, planeFiles, runnerFiles, connections, subscriptions int }

func files(pid int) int {
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return -1
	}
	return len(list)
}

var goroutines = regexp.MustCompile(`(?m)^go_goroutines (\d+)`)

func (w *world) holdings() (h holdings) {
	w.t.Helper()
	w.client.CloseIdleConnections()
	http.DefaultClient.CloseIdleConnections()
	metrics := get(w.t, w.plane, "/metrics")
	if m := goroutines.FindStringSubmatch(metrics); m != nil {
		h.goroutines, _ = strconv.Atoi(m[1])
	} else {
		w.t.Fatal("/metrics has no go_goroutines")
	}
	h.planeFiles = files(w.plane.Process.PID)
	for _, m := range w.runners {
		h.runnerFiles += files(m.process.PID)
	}
	h.connections, h.subscriptions = w.interest()
	return h
}

// interest is the connections of account RUN and their subscriptions.
func (w *world) interest() (connections, subscriptions int) {
	w.t.Helper()
	sys := w.sys()
	answer, err := sys.Request("$SYS.REQ.SERVER."+sys.ConnectedServerId()+".CONNZ", []byte(`{"acc":"RUN","limit":4096}`), stack.Patience)
	if err != nil {
		w.t.Fatal(err)
	}
	var page struct {
		Data struct {
			Connections []struct {
				Subscriptions int `json:"subscriptions"`
			} `json:"connections"`
		} `json:"data"`
	}
	if err := json.Unmarshal(answer.Data, &page); err != nil {
		w.t.Fatal(err)
	}
	for _, c := range page.Data.Connections {
		subscriptions += c.Subscriptions
	}
	return len(page.Data.Connections), subscriptions
}

func (w *world) sys() *nats.Conn {
	w.t.Helper()
	for _, c := range w.conns {
		if c.Opts.Name == "chaos-sys" {
			return c
		}
	}
	return w.connect("sys")
}

// baseline is the holdings after a first round of quiet fetches, when everything that is made once is there.
func (w *world) baseline() holdings {
	w.t.Helper()
	w.sys()
	w.quiet()
	return w.settled(nil)
}

// quiet fills every slot of every runner at once, with fetches that all complete: no slot is lost.
func (w *world) quiet() {
	w.t.Helper()
	w.run(w.allSlots(true), nil)
}

// free waits until every slot of every runner can be had at once, within the time in which runners keep results for a control plane
// that was killed: as many of those as there are slots hold new work back.
func (w *world) free() {
	w.t.Helper()
	if !eventually(2*time.Minute, func() bool {
		all := w.allSlots(false)
		w.run(all, nil)
		return !slices.ContainsFunc(all, func(j *job) bool { return !j.accepted })
	}) {
		w.broken("slots", "not all slots can be had two minutes after the last fault")
	}
}

// over waits until the control plane has seen the ends of all fetches.
func (w *world) over() {
	w.t.Helper()
	if !eventually(stack.Patience, func() bool { return len(w.underWayThere()) == 0 }) {
		w.broken("leak", "fetches are still running at the end")
	}
}

// settled waits until nothing is under way, and then until no more is held than before (nil: the least of several looks, with every connection).
func (w *world) settled(before *holdings) (h holdings) {
	w.t.Helper()
	w.over()
	if before == nil {
		h = w.holdings()
		for range 8 {
			<-time.After(100 * time.Millisecond)
			one := w.holdings()
			h.goroutines, h.planeFiles, h.runnerFiles = min(h.goroutines, one.goroutines), min(h.planeFiles, one.planeFiles), min(h.runnerFiles, one.runnerFiles)
			switch { // with a connection that is being made anew its subscriptions are missing
			case one.connections > h.connections:
				h.connections, h.subscriptions = one.connections, one.subscriptions
			case one.connections == h.connections:
				h.subscriptions = min(h.subscriptions, one.subscriptions)
			}
		}
		return h
	}
	const spare = 12 // timers and idle HTTP connections come and go; a leak grows with the dispatches
	if !eventually(stack.Patience, func() bool {
		h = w.holdings()
		return h.goroutines <= before.goroutines+spare && h.planeFiles <= before.planeFiles+spare && h.runnerFiles <= before.runnerFiles+spare &&
			h.connections <= before.connections && h.subscriptions <= before.subscriptions
	}) {
		w.broken("leak", "before %+v, now %+v", *before, h)
	}
	return h
}
