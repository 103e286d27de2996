package embedded_test

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/internal/natsdial"
	"github.com/org-runink/runbus/schemas"
)

// What a client does wrong is a warning with its subject in it; a start is quiet.
func TestServerLog(t *testing.T) {
	hook := newLogHook()
	b := bustest.Start(t, func(c *embedded.Config) { c.Log = slog.New(hook) })
	for done := false; !done; {
		select {
		case r := <-hook.lines:
			slow := strings.Contains(r.Message, "took too long") || strings.Contains(r.Message, "processing time") // of a machine that stood still
			if r.Level > slog.LevelDebug && !slow {
				t.Errorf("the start says %s: %s", r.Level, r.Message)
			}
		default:
			done = true
		}
	}
	if err := b.OpsConn(t).Publish("forbidden.subject", nil); err != nil {
		t.Fatal(err)
	}
	if r := hook.expect(t, `Publish Violation - Subject "forbidden.subject"`); r.Level != slog.LevelWarn {
		t.Errorf("a violation is logged as %s", r.Level)
	}
}

// A credential that somebody put into the place of a name does not get into the log.
func TestServerLogHasNoCredential(t *testing.T) {
	hook := newLogHook()
	b := bustest.Start(t, func(c *embedded.Config) { c.Log = slog.New(hook) })
	b.OpsConn(t)
	session := schemas.NewSessionToken()
	service, _, err := schemas.NewServiceToken("acme")
	if err != nil {
		t.Fatal(err)
	}
	seed := service[strings.LastIndexByte(service, '.')+1:]
	for _, secret := range []string{session, service, seed} {
		nc, err := natsdial.Connect(soon, b.URL(), nats.Timeout(soon), nats.RootCAs(b.CAFile), nats.UserInfo(secret, secret), nats.Name(secret))
		if err == nil {
			nc.Close()
			t.Fatal("let in")
		}
		for {
			r := <-hook.lines
			if strings.Contains(r.Message, session) || strings.Contains(r.Message, seed) {
				t.Fatalf("a credential in the log: %s: %s", r.Level, r.Message)
			}
			if strings.Contains(r.Message, "authentication error") {
				if !strings.Contains(r.Message, "[redacted]") {
					t.Errorf("the user is not in the line, so the test shows nothing: %s", r.Message)
				}
				break
			}
		}
	}
}
