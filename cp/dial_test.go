package cp_test

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/cp"
	"github.com/org-runink/runbus/cp/egress"
)

// refusals hears of refused links: the reason and the text of each.
type refusals struct {
	slog.Handler
	seen chan string
}

func (r refusals) Handle(ctx context.Context, record slog.Record) error {
	if strings.HasPrefix(record.Message, "the link was refused") {
		text := record.Message
		record.Attrs(func(a slog.Attr) bool {
			if a.Key == "reason" {
				text = a.Value.String() + ": " + text
			}
			return true
		})
		r.seen <- text
	}
	return r.Handler.Handle(ctx, record)
}

func (r refusals) WithAttrs(attrs []slog.Attr) slog.Handler {
	return refusals{r.Handler.WithAttrs(attrs), r.seen}
}

// Where a tenant's people may have the control plane dial is the operator's to say: over an address at once, over what a name leads to
// at the dial. The answer names the rule, and is the same whether or not anything listens there.
func TestWhatTheOperatorKeepsFromBeingDialled(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	knocked := make(chan struct{}, 1)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.Close()
			knocked <- struct{}{}
		}
	}()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = closed.Close()
	port := func(l net.Listener) string {
		_, p, _ := net.SplitHostPort(l.Addr().String())
		return p
	}

	seen := make(chan string, 100)
	s := newSceneWith(t, func(c *cp.Config) {
		if c.DialDeny, err = egress.Parse(egress.EnvDeny, "127.0.0.0/8, ::1"); err != nil {
			t.Fatal(err)
		}
		c.Log = slog.New(refusals{c.Log.Handler(), seen})
	})
	body := func(name, address string) string { return `{"name":"` + name + `","address":"` + address + `"}` }
	const rule = "CORE_RUNNER_DIAL_DENY has 127.0.0.0/8"
	if p := s.call(t, writer, http.MethodPost, "/api/runners", body("direct", "127.0.0.1:"+port(l))).problem(t); p.Code != "invalid" || !strings.Contains(p.Detail, rule) {
		t.Errorf("an address that is refused: %+v", p)
	}
	texts := map[string]string{}
	for _, where := range []net.Listener{l, closed} {
		name := "r" + port(where)
		s.must(t, writer, http.MethodPost, "/api/runners", body(name, "localhost:"+port(where)), nil)
		var shown struct{ Dial struct{ LastError string } }
		for give := time.Now().Add(time.Minute); shown.Dial.LastError == "" && time.Now().Before(give); { // which is set before it is logged
			select {
			case logged := <-seen: // of this one, or once more of the one before
				if !strings.HasPrefix(logged, "forbidden_address: ") || !strings.Contains(logged, "CORE_RUNNER_DIAL_DENY has ") {
					t.Errorf("logged %q", logged)
				}
			case <-time.After(time.Minute):
				t.Fatal("the refusal is not in the log")
			}
			s.must(t, writer, http.MethodGet, "/api/runners/"+name, "", &shown)
		}
		texts[shown.Dial.LastError] = name
		s.must(t, writer, http.MethodPost, "/api/runners/"+name+"/revoke", "", nil)
	}
	if len(texts) != 1 {
		t.Errorf("the answer tells where something listens: %v", texts)
	}
	for text := range texts {
		if !strings.HasPrefix(text, "the control plane dials no runner there: CORE_RUNNER_DIAL_DENY has ") {
			t.Errorf("the answer is %q", text)
		}
	}
	select {
	case <-knocked:
		t.Error("it was dialled all the same")
	default:
	}
}

// No setting lets the control plane be had to dial itself.
func TestTheControlPlaneDoesNotDialItself(t *testing.T) {
	s := newScene(t)
	for what, address := range map[string]string{"API": strings.TrimPrefix(s.url, "http://"), "NATS": strings.TrimPrefix(s.Endpoints().NATS, "tls://")} {
		if p := s.call(t, admin, http.MethodPost, "/api/runners", `{"name":"self","address":"`+address+`"}`).problem(t); p.Code != "invalid" || !strings.Contains(p.Detail, "it is the control plane itself") {
			t.Errorf("%s at %s: %+v", what, address, p)
		}
	}
}

// A runner that is created or moved is dialled once, and then when it is due again: not once for the change and once for the request.
func TestARunnerIsDialledOnceForEachChange(t *testing.T) {
	listen := func() (address string, came chan time.Time) {
		came = make(chan time.Time, 100)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				came <- time.Now()
				_ = conn.Close()
			}
		}()
		return l.Addr().String(), came
	}
	next := func(came chan time.Time) time.Time {
		t.Helper()
		select {
		case at := <-came:
			return at
		case <-time.After(time.Minute):
			t.Fatal("it is not dialled")
			return time.Time{}
		}
	}
	s := newScene(t)
	first, atFirst := listen()
	second, atSecond := listen()
	s.must(t, admin, http.MethodPost, "/api/runners", `{"name":"edge","address":"`+first+`"}`, nil)
	for _, c := range []struct {
		what string
		came chan time.Time
	}{{"created", atFirst}, {"moved", atSecond}} {
		at := next(c.came)
		if pause := next(c.came).Sub(at); pause < 400*time.Millisecond { // half a second at least is waited after a failure
			t.Errorf("a runner that was %s is dialled again after %s", c.what, pause)
		}
		if c.what == "created" {
			s.must(t, admin, http.MethodPatch, "/api/runners/edge", `{"address":"`+second+`"}`, nil)
		}
	}
	s.must(t, admin, http.MethodPost, "/api/runners/edge/connect", "", nil) // but at once on request
	next(atSecond)
}
