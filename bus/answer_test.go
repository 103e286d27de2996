package bus_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

func TestMain(m *testing.M) { leak.Main(m) }

var edge = schemas.RunnerRef{Tenant: "acme", Runner: "edge.1"}

// patience bounds every wait of these tests; nothing is expected to take this long.
const patience = 2 * time.Minute

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// The answer goes to an inbox of the runner that asked, and nowhere else: after each attempt the only message that has left
// the connection is the marker published behind it.
func TestAnswerOnlyToTheAsker(t *testing.T) {
	b := bustest.Start(t)
	// The connection of the control plane that may do most: were the rule not kept, the server would not stop it.
	conn := bus.NewConn(b.Conn(t, embedded.UserSec))
	all, err := conn.NATS().SubscribeSync(">")
	if err != nil {
		t.Fatal(err)
	}
	own := schemas.InboxPrefix(edge)
	hello := schemas.HelloSubject(edge)
	for _, c := range []struct{ name, subject, reply string }{
		{"another runner's inbox", hello, schemas.InboxPrefix(schemas.RunnerRef{Tenant: "acme", Runner: "edge.2"}) + ".x"},
		{"another tenant's inbox", hello, schemas.InboxPrefix(schemas.RunnerRef{Tenant: "acmf", Runner: "edge.1"}) + ".x"},
		{"none", hello, ""},
		{"wildcard", hello, "*"},
		{"everything", hello, ">"},
		{"inbox with *", hello, own + ".*"},
		{"inbox with >", hello, own + ".>"},
		{"inbox without more", hello, own},
		{"inbox with an empty token", hello, own + "..x"},
		{"inbox with a last dot", hello, own + ".x."},
		{"inbox with a space", hello, own + ".x y"},
		{"inbox with a line", hello, own + ".x\r\nPUB y 0"},
		{"JetStream", hello, "$JS.API.STREAM.DELETE.RUNBUS_AUDIT"},
		{"bucket", hello, "$KV.runbus_identities.x"},
		{"system", hello, "$SYS.REQ.SERVER.PING"},
		{"public inbox", hello, "_INBOX.x.y"},
		{"its own work", hello, schemas.WorkSubject(edge, "5e55")},
		{"its own control", hello, schemas.ControlSubject(edge, "5e55")},
		{"its own hello", hello, hello},
		{"unescaped id", hello, "runbus.v1.acme.runner.edge.1.inbox.x"},
		{"another version", hello, strings.Replace(own, "v1", "v2", 1) + ".x"},
		{"request on no runner's subject", "runbus.v1.hello", own + ".x"},
		{"request on a foreign subject", "orders.new", own + ".x"},
		{"request on a wildcard", "runbus.v1.acme.runner.*.hello", own + ".x"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := conn.Answer(&nats.Msg{Subject: c.subject, Reply: c.reply}, &runbusv1.EnrollmentAccepted{})
			if !errors.Is(err, bus.ErrForeignReply) {
				t.Errorf("error %v", err)
			}
			if err := conn.NATS().Publish("marker", []byte(c.name)); err != nil {
				t.Fatal(err)
			}
			for {
				msg, err := all.NextMsg(patience)
				if err != nil {
					t.Fatal(err)
				}
				if msg.Subject == "marker" {
					return
				}
				if name := bus.TypeOf(msg); name != "" {
					t.Errorf("a %s went to %q", name, msg.Subject)
				}
			}
		})
	}
}

// A runner's request is answered into its own inbox, over its real permissions.
func TestRequestAndAnswer(t *testing.T) {
	b := bustest.Start(t)
	serve := bus.NewConn(b.Conn(t, embedded.UserServe))
	runner := bus.NewConn(b.RunnerConn(t, edge))
	ask := func(ctx context.Context, id string) (*runbusv1.EnrollmentAccepted, error) {
		got := &runbusv1.EnrollmentAccepted{}
		err := runner.Request(ctx, schemas.HelloSubject(edge), &runbusv1.RunnerHello{RunnerId: id}, got)
		return got, err
	}
	if _, err := ask(within(t), "x"); !errors.Is(err, bus.ErrNoResponders) {
		t.Fatalf("nobody serves yet: %v", err)
	}
	failed := make(chan error, 100)
	_, err := serve.QueueSubscribe(schemas.AllHellos, "serve", func(msg *nats.Msg) {
		hello := &runbusv1.RunnerHello{}
		if err := bus.Decode(msg, hello); err != nil {
			failed <- err
			return
		}
		if hello.GetRunnerId() == "ignored" {
			return
		}
		if err := serve.Answer(msg, &runbusv1.EnrollmentAccepted{RunnerId: hello.GetRunnerId()}); err != nil {
			failed <- err
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := serve.NATS().Flush(); err != nil {
		t.Fatal(err)
	}
	answers := make(chan error)
	all := within(t)
	for i := range 50 {
		go func() {
			id := strings.Repeat("a", i+1)
			got, err := ask(all, id)
			if err == nil && got.GetRunnerId() != id {
				err = errors.New("the answer to another request: " + got.GetRunnerId())
			}
			answers <- err
		}()
	}
	for range 50 {
		if err := <-answers; err != nil {
			t.Error(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := ask(ctx, "ignored"); !errors.Is(err, context.Canceled) {
		t.Errorf("a request that was given up: %v", err)
	}
	select {
	case err := <-failed:
		t.Error(err)
	default:
	}
}

// answersItsServer are the files that may call Respond once, on messages that only the NATS server itself can send.
var answersItsServer = map[string]string{
	"bus/bustest/callout.go": "authorization requests, in account AUTH",
	"jetstream/follow.go":    "flow control of its own consumer, in account SEC",
}

// Nobody calls Respond (DESIGN): it would answer to whatever reply subject a message brings. The micro service's requests come
// from account OPS alone and are answered by nats.go's micro package.
func TestNobodyCallsRespond(t *testing.T) {
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(root, "go.mod")); err != nil {
		t.Fatal(err)
	}
	micro := regexp.MustCompile(`"github\.com/nats-io/nats\.go/micro"`)
	call := regexp.MustCompile(`\.Respond(Msg|JSON)?\(`)
	seen := 0
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != root {
			return filepath.SkipDir
		}
		if d.IsDir() && path == filepath.Join(root, "bin") { // what is built, with copies of the server and the client (internal/smallstack)
			return filepath.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		source, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // an editor moved it
		}
		if err != nil {
			return err
		}
		seen++
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		most := 0
		if answersItsServer[filepath.ToSlash(name)] != "" {
			most = 1
		}
		if !micro.Match(source) && len(call.FindAll(source, -1)) > most {
			t.Errorf("%s calls Respond: use bus.Conn.Answer", name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen < 10 {
		t.Fatalf("only %d files were read", seen)
	}
}
