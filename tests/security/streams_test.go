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

// contents is everything that JetStream holds in one account: per stream its configuration and its messages by sequence.
type contents map[string]struct {
	config   string
	lastSeq  uint64
	messages map[uint64]stored
}

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
		st, err := js.Stream(ctx, name)
		if err != nil {
			t.Fatal(err)
		}
		info := st.CachedInfo()
		config, err := json.Marshal(info.Config)
		if err != nil {
			t.Fatal(err)
		}
		entry := out[name]
		entry.config, entry.lastSeq, entry.messages = string(config), info.State.LastSeq, map[uint64]stored{}
		for seq := max(1, info.State.FirstSeq); seq <= info.State.LastSeq; seq++ {
			m, err := st.GetMsg(ctx, seq)
			if errors.Is(err, natsjs.ErrMsgNotFound) {
				continue // a later value of the key took its place
			}
			if err != nil {
				t.Fatalf("%s %d: %v", name, seq, err)
			}
			header, err := json.Marshal(m.Header)
			if err != nil {
				t.Fatal(err)
			}
			entry.messages[seq] = stored{m.Subject, string(header), string(m.Data)}
		}
		out[name] = entry
	}
	if err := names.Err(); err != nil && !errors.Is(err, natsjs.ErrEndOfData) {
		t.Fatal(err)
	}
	return out
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
var refreshed = []string{"lastSeen", "replica", "loadScore", "inFlight", "limit", "draining", "ready", "name", "version", "capabilities", "pid", "startedAt"}

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
