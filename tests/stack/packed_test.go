package stack

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/tests/canary"
)

// findings takes what a look finds, instead of failing the test for it.
type findings struct {
	testing.TB

	told []string
}

// Errorf implements testing.TB.
func (f *findings) Errorf(format string, args ...any) {
	f.told = append(f.told, fmt.Sprintf(format, args...))
}

// firstAudit waits for the first message of the audit stream.
func firstAudit(ctx context.Context, nc *nats.Conn) (natsjs.Msg, error) {
	js, err := natsjs.New(nc)
	if err != nil {
		return nil, err
	}
	consumer, err := js.OrderedConsumer(ctx, "RUNBUS_AUDIT", natsjs.OrderedConsumerConfig{})
	if err != nil {
		return nil, err
	}
	messages, err := consumer.Messages()
	if err != nil {
		return nil, err
	}
	defer messages.Stop()
	return messages.Next(natsjs.NextContext(ctx))
}

// A secret in a batch that the audit log has packed is found in the stream's files.
func TestPackedAuditIsSearched(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*Patience)
	defer cancel()
	b := bustest.Start(t)
	nc := b.Conn(t, embedded.UserSec)
	store, err := jetstream.Open(ctx, nc, jetstream.Options{Fresh: true, Log: b.Log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	log, err := audit.New(ctx, store, "one", b.Log)
	if err != nil {
		t.Fatal(err)
	}
	// Its halves stand before it, so that what is packed has it only in pieces.
	const first, second = "c4nary-in-a-batch", "of-many-events-9Kq"
	Secrets.Add("packed secret", "a test", []byte(first+second), canary.Text)
	note := func(subject string) { log.Note(audit.Event("person:ada", "key.mint", subject, "ok")) }
	for i := range 300 {
		note(first + " " + strconv.Itoa(i) + " " + second)
	}
	note(first + second)
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- log.Run(running) }()
	m, err := firstAudit(ctx, nc)
	stop()
	if ended := <-done; err != nil || ended != nil {
		t.Fatalf("write the audit: %v, %v", err, ended)
	}
	if text, err := audit.Text(m.Data()); err != nil || m.Headers().Get("Content-Encoding") != "snappy" || !strings.Contains(string(text), `"`+first+second+`"`) {
		t.Fatalf("the secret is not in a packed batch: %v, header %v", err, m.Headers())
	}
	b.Shutdown() // what it holds is in its files then
	found := &findings{TB: t}
	InspectFolder(found, filepath.Join(b.Dir, "store"), "the test's server")
	if !slices.ContainsFunc(found.told, func(line string) bool {
		return strings.HasPrefix(line, "LEAK packed secret in file ") && strings.Contains(line, "RUNBUS_AUDIT/msgs/")
	}) {
		t.Errorf("it is not found: %q", found.told)
	}
}
