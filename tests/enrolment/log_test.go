package enrolment

import (
	"context"
	"crypto/tls"
	"log/slog"
	"strings"
	"testing"

	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/runner/intake"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// A failed enrolment is one line in the runner's log, with its reason, peer and what to do.
func TestAFailedEnrolmentIsLoggedOnce(t *testing.T) {
	p := start(t)
	r, old := p.create(t, "edge")
	_, minted, err := p.roster.Mint(t.Context(), ada, r.ID)
	must(t, err)
	if fresh := p.ticket(r, minted); fresh.Token == old.Token {
		t.Fatal("the second ticket is the first")
	}
	h := newHost(t, &old) // which was replaced
	h.stop()
	store, err := identity.Open(h.dir)
	must(t, err)
	defer func() { _ = store.Close() }()
	use, err := store.Admit(&old, h.clock.now())
	must(t, err)
	var logged logBuffer
	log := slog.New(slog.NewTextHandler(&logged, nil))
	responder := identity.NewResponder(identity.ResponderConfig{Store: store, Ticket: use, Log: log})
	served := make(chan error, 1)
	i, err := intake.Open(t.Context(), intake.Config{
		Listen: "127.0.0.1:0", Log: log, TLS: func(string) (*tls.Config, error) { return responder.TLS(), nil },
		Enrol: func(ctx context.Context, conn *tls.Conn) error {
			err := responder.Serve(ctx, conn)
			served <- err
			return err
		},
		Link: func(context.Context, *tls.Conn, *runbusv1.LinkPreface, string) error { return nil },
	})
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- i.Serve(ctx) }()
	if err := p.exchange(t.Context(), i.Addr().String(), p.runner(t, r.ID)); err == nil {
		t.Fatal("a ticket that was replaced enrolled")
	}
	if err := <-served; err == nil {
		t.Error("the runner noticed nothing")
	}
	cancel()
	must(t, <-ended)
	var lines []string
	for line := range strings.Lines(logged.String()) {
		if !strings.Contains(line, "level=INFO") {
			lines = append(lines, line)
		}
	}
	if len(lines) != 1 || !strings.Contains(lines[0], "did not prove that it holds the ticket") || !strings.Contains(lines[0], "peer=127.0.0.1:") || !strings.Contains(lines[0], "hint=") {
		t.Errorf("logged %q", lines)
	}
}
