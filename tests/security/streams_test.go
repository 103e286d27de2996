package security

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/tests/stack"
)

// stored is one message of a stream.
type stored struct{ subject, header, body string }

// kept is one stream: its configuration, and its messages by sequence.
type kept struct {
	config   string
	lastSeq  uint64
	messages map[uint64]stored
}

// contents is everything that JetStream holds in one account, by the name of the stream.
type contents map[string]kept

// readStreams reads all of it over a connection in that account.
func readStreams(t testing.TB, c *client) contents {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), stack.Patience)
	defer cancel()
	js, err := natsjs.New(c.Conn)
	if err != nil {
		t.Fatal(err)
	}
	out := contents{}
	names := js.StreamNames(ctx)
	for name := range names.Name() {
		out[name] = readStream(ctx, t, js, name)
	}
	if err := names.Err(); err != nil && !errors.Is(err, natsjs.ErrEndOfData) {
		t.Fatal(err)
	}
	return out
}

// readStream reads what the stream held at one moment: a stream that was written while it was read is read again, since a value that
// takes another's place meanwhile would be missing.
func readStream(ctx context.Context, t testing.TB, js natsjs.JetStream, name string) kept {
	t.Helper()
	st, err := js.Stream(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	for info := st.CachedInfo(); ; {
		config, err := json.Marshal(info.Config)
		if err != nil {
			t.Fatal(err)
		}
		out := kept{string(config), info.State.LastSeq, readMessages(ctx, t, st, info.State)}
		now, err := st.Info(ctx)
		if err != nil {
			t.Fatalf("%s, which is written all the time: %v", name, err)
		}
		if was := info.State; now.State.LastSeq == was.LastSeq && now.State.FirstSeq == was.FirstSeq && now.State.Msgs == was.Msgs {
			return out
		}
		info = now
	}
}

// readMessages reads those that are there of the ones that state counts.
func readMessages(ctx context.Context, t testing.TB, st natsjs.Stream, state natsjs.StreamState) map[uint64]stored {
	t.Helper()
	out := map[uint64]stored{}
	for seq := max(1, state.FirstSeq); seq <= state.LastSeq; seq++ {
		m, err := st.GetMsg(ctx, seq)
		if errors.Is(err, natsjs.ErrMsgNotFound) {
			continue // a later value of the key took its place
		}
		if err != nil {
			t.Fatalf("%s %d: %v", st.CachedInfo().Config.Name, seq, err)
		}
		header, err := json.Marshal(m.Header)
		if err != nil {
			t.Fatal(err)
		}
		out[seq] = stored{m.Subject, string(header), string(m.Data)}
	}
	return out
}

// awaitLease returns when it is recorded that the runner has its link: that is written beside the link, not before it.
func awaitLease(t testing.TB, c *client, runner string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), stack.Patience)
	defer cancel()
	js, err := natsjs.New(c.Conn)
	if err != nil {
		t.Fatal(err)
	}
	leases, err := js.KeyValue(ctx, "runbus_leases")
	if err != nil {
		t.Fatal(err)
	}
	watch, err := leases.Watch(ctx, runner)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = watch.Stop() }() // the connection may have gone
	for {
		select {
		case e := <-watch.Updates():
			if e != nil && e.Operation() == natsjs.KeyValuePut && len(e.Value()) > 0 {
				return
			}
		case <-ctx.Done():
			t.Fatalf("the link of %s is not recorded", runner)
		}
	}
}

// beats are the buckets that a runner's legitimate hellos and heartbeats change, and its link by being there; nothing else may.
var beats = []string{"KV_runbus_heartbeats", "KV_runbus_known", "KV_runbus_leases"}

// sameStreams compares message by message. In the buckets of beats each key must be there as before, and its value may
// differ in what a heartbeat refreshes; in all other streams nothing may differ.
func sameStreams(t testing.TB, before, after contents) {
	t.Helper()
	if had, has := slices.Sorted(maps.Keys(before)), slices.Sorted(maps.Keys(after)); !slices.Equal(had, has) {
		t.Fatalf("the streams are %q, were %q", has, had)
	}
	for name, was := range before {
		is := after[name]
		if is.config != was.config {
			t.Errorf("%s is configured otherwise: %s, was %s", name, is.config, was.config)
		}
		if slices.Contains(beats, name) {
			had, has := lastValues(t, was.messages), lastValues(t, is.messages)
			if !maps.EqualFunc(had, has, maps.Equal) {
				t.Errorf("%s says %v, said %v", name, has, had)
			}
			continue
		}
		if is.lastSeq != was.lastSeq {
			t.Errorf("%s is at %d, was at %d", name, is.lastSeq, was.lastSeq)
		}
		if !maps.Equal(is.messages, was.messages) {
			t.Errorf("messages of %s differ", name)
		}
	}
}

// refreshed is what a heartbeat, or the hello of a process that is enrolled already, changes in a record.
var refreshed = []string{"lastSeen", "beat", "replica", "loadScore", "inFlight", "limit", "draining", "ready", "name", "version", "capabilities", "pid", "startedAt"}

// lastValues is the newest record of each key without what is refreshed.
func lastValues(t testing.TB, messages map[uint64]stored) map[string]map[string]string {
	t.Helper()
	out := map[string]map[string]string{}
	for _, seq := range slices.Sorted(maps.Keys(messages)) {
		m := messages[seq]
		var record map[string]json.RawMessage
		if err := json.Unmarshal([]byte(m.body), &record); err != nil {
			t.Errorf("%s at %d is no record: %q", m.subject, seq, m.body)
			continue
		}
		fields := map[string]string{}
		for field, value := range record {
			if !slices.Contains(refreshed, field) {
				fields[field] = string(value)
			}
		}
		// The key must be the one of the runner that is in it; a lease has none in it.
		lease := strings.HasPrefix(m.subject, "$KV.runbus_leases.")
		if key := m.subject[strings.LastIndex(m.subject, ".")+1:]; `"`+strings.ReplaceAll(key, "=2E", ".")+`"` != fields["runner"] && !lease {
			t.Errorf("%s holds the record of %s", m.subject, fields["runner"])
		}
		out[m.subject] = fields
	}
	return out
}
