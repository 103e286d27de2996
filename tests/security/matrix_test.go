package security

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
	"github.com/org-runink/runbus/tests/stack"
)

// A runner of tenant A with its real credential: whatever it subscribes, publishes, requests, or names as the reply subject
// of its own hello and heartbeat, it gets nothing, reaches nobody, sees the refusal, and no stream is written.
func TestARunnerReachesNothingButItsOwn(t *testing.T) {
	stack.EachLink(t, reachesNothingButItsOwn)
}

func reachesNothingButItsOwn(t *testing.T, link stack.Link) {
	s := newScene(t, link)
	serverID := s.a1.ConnectedServerId()
	both := forbidden(serverID, s.a1, s.a2, s.b1)
	listen := append(slices.Clone(both), ownSend(s.a1)...)
	speak := append(slices.Clone(both), ownReceive(s.a1)...)
	before := s.read(t)
	for _, name := range []string{"KV_runbus_heartbeats", "KV_runbus_identities", "KV_runbus_known", "RUNBUS_AUDIT"} {
		if len(before[name].messages) == 0 {
			t.Fatalf("%s holds nothing: comparing it would show nothing", name)
		}
	}
	opsBefore := readNames(t, s.publishers[byOps])

	t.Run("subscribe", func(t *testing.T) { s.subscribes(t, listen, "") })
	t.Run("queue subscribe", func(t *testing.T) { s.subscribes(t, listen, "registry") })
	t.Run("publish", func(t *testing.T) { s.publishes(t, speak, false) })
	t.Run("request", func(t *testing.T) { s.publishes(t, speak, true) })
	replies := append(slices.Clone(both), ownSend(s.a1)...)
	replies = append(replies, ownReceive(s.a1)[:3]...)
	replies = append(replies, own(s.a1.ref, "inbox.>"), own(s.a1.ref, "inbox.*"), own(s.a1.ref, "inbox.x.>"), own(s.a1.ref, "inbox.=2E"), own(s.a1.ref, "inbox..x"))
	const foreign = `runbus_registry_dropped_total{reason="foreign_reply"}`
	hello := s.a1.signedHello(t, s.a1.ref.Runner)
	t.Run("reply of its hello", func(t *testing.T) {
		s.replies(t, replies, schemas.HelloSubject(s.a1.ref), hello, foreign)
	})
	t.Run("reply of its heartbeat", func(t *testing.T) {
		s.replies(t, replies, schemas.HeartbeatSubject(s.a1.ref), s.a1.heartbeat(), heartbeats)
	})
	t.Run("reply of a heartbeat that is answered", func(t *testing.T) { // HELLO_FIRST
		s.replies(t, replies, schemas.HeartbeatSubject(s.a1.ref), &runbusv1.RunnerHeartbeat{}, foreign)
	})
	t.Run("reply of a goodbye that is answered", func(t *testing.T) {
		s.replies(t, replies, schemas.GoodbyeSubject(s.a1.ref), &runbusv1.RunnerGoodbye{}, foreign)
	})

	s.beat(t)
	sameStreams(t, before, s.read(t))
	if names := readNames(t, s.publishers[byOps]); !slices.Equal(names, opsBefore) {
		t.Errorf("the streams in OPS are %q, were %q", names, opsBefore)
	}
	// The same connection still does what it may.
	if answer := s.a1.trueHello(t); answer.GetError() != nil || answer.GetSession() != s.a1.session {
		t.Errorf("afterwards its hello is answered with %v", answer)
	}
	t.Logf("%d attempts", s.round)
}

// subscribes listens where it must not, while somebody who may publishes there, then the marker comes.
func (s *scene) subscribes(t *testing.T, subjects []string, queue string) {
	s.beat(t)
	all := traffic(s.a2, s.b1)
	for _, subject := range subjects {
		s.keepAlive(t)
		var sub *nats.Subscription
		var err error
		queue := queue
		if queue != "" && subject == "$SYS.REQ.USER.AUTH" {
			queue = "runbus-callout" // to answer in the control plane's place
		}
		if queue == "" {
			sub, err = s.a1.ChanSubscribe(subject, s.watchers[0].got)
		} else {
			sub, err = s.a1.ChanQueueSubscribe(subject, queue, s.watchers[0].got)
		}
		if err != nil {
			t.Fatalf("%q: %v", subject, err)
		}
		s.a1.violation(t, "Subscription to", subject)
		var sent []string
		for _, m := range all {
			if !matches(subject, m.subject) {
				continue
			}
			sent = append(sent, m.subject)
			s.publish(t, m)
		}
		if strings.HasPrefix(subject, "runbus.v1.") && !strings.ContainsAny(subject, "*>") && len(sent) == 0 {
			s.mimic(t, subject)
		}
		got := s.listen(t)
		if msgs := slices.DeleteFunc(got["a1"], s.isPolled); len(msgs) > 0 {
			t.Errorf("subscribed to %q it got %q before the marker: %.200q", subject, msgs[0].Subject, msgs[0].Data)
		}
		for _, want := range sent { // the messages were real: somebody got each
			if !slices.ContainsFunc(s.watchers, func(w *watcher) bool {
				return slices.ContainsFunc(got[w.name], func(m *nats.Msg) bool { return m.Subject == want })
			}) {
				t.Errorf("nobody got the message on %q", want)
			}
		}
		if err := sub.Unsubscribe(); err != nil {
			t.Fatal(err)
		}
		s.a1.quiet(t, subject)
	}
}

// publish sends real traffic.
func (s *scene) publish(t *testing.T, m realMessage) {
	t.Helper()
	by := s.publishers[m.by]
	switch r := map[from]*runner{byOther: s.a2, byB: s.b1}[m.by]; {
	case r != nil && m.subject == schemas.HeartbeatSubject(r.ref):
		s.accept(t, 1, func() { by.send(t, m.subject, "", r.heartbeat()) })
	default:
		if err := by.Publish(m.subject, []byte(`{"real":true}`)); err != nil {
			t.Fatal(err)
		}
	}
	by.flush(t)
}

// mimic publishes where only a runner that is not there could: the control plane may, on subjects to runners.
func (s *scene) mimic(t *testing.T, subject string) {
	t.Helper()
	for _, toRunner := range []string{"*.*.*.*.*.work.*", "*.*.*.*.*.control.*", "*.*.*.*.*.credit.*", "*.*.*.*.*.inbox.>"} {
		if matches(toRunner, subject) {
			s.publish(t, realMessage{byServe, subject})
		}
	}
}

// publishes speaks where it must not.
func (s *scene) publishes(t *testing.T, subjects []string, request bool) {
	s.beat(t)
	for i, subject := range subjects {
		s.keepAlive(t)
		token := fmt.Sprintf("attempt-%d-%t", i, request)
		msg := &nats.Msg{Subject: subject, Data: []byte(`{"` + token + `":1}`)}
		if request {
			msg.Reply = own(s.a1.ref, "inbox."+token)
		}
		if err := s.a1.PublishMsg(msg); err != nil {
			t.Fatalf("%q: %v", subject, err)
		}
		s.a1.violation(t, "Publish to", subject)
		s.nothing(t, s.listen(t), token, nil)
		if t.Failed() {
			t.Fatalf("publishing to %q had an effect", subject)
		}
	}
}

// replies names each subject as the reply subject of a message that it may send. counter is the figure that tells that the
// control plane is done with the message.
func (s *scene) replies(t *testing.T, replies []string, subject string, m proto.Message, counter string) {
	s.beat(t)
	done, began, accepted := metric(t, s.plane.Admin, counter), tallied(t, s.plane.Admin), 0.0
	last := began
	for _, reply := range replies {
		if s.keepAlive(t) {
			done = metric(t, s.plane.Admin, counter)
			last = tallied(t, s.plane.Admin)
		}
		s.a1.send(t, subject, reply, m)
		reserved := isReserved(reply)
		if reserved { // the server itself keeps those back, with the message
			s.a1.violation(t, "Publish with Reply of", reply)
		} else {
			done++
			awaitMetric(t, s.plane.Admin, counter, done)
		}
		if counter == heartbeats {
			now := tallied(t, s.plane.Admin)
			accepted += now.accepted - last.accepted
			last = now
		}
		heard := map[string]int{}
		s.nothing(t, s.listen(t), "attempt-", func(watcher string, m *nats.Msg) bool {
			itself := (watcher == "serve" || watcher == "ops") && m.Subject == subject
			if itself {
				heard[watcher]++
			}
			return itself
		})
		if want := map[bool]int{false: 1, true: 0}[reserved]; heard["serve"] != want || heard["ops"] != want {
			t.Errorf("the message itself came %d and %d times, want %d", heard["serve"], heard["ops"], want)
		}
		if t.Failed() {
			t.Fatalf("the reply subject %q had an effect", reply)
		}
	}
	s.a1.quiet(t, subject)
	if n := tallied(t, s.plane.Admin).turnedDown - began.turnedDown; n != 0 {
		t.Errorf("%v heartbeats were turned down", n)
	}
	if counter == heartbeats && accepted == 0 {
		t.Error("none of the heartbeats was taken in")
	}
}

// isReserved tells the reply subjects that no client may name.
func isReserved(reply string) bool {
	for _, prefix := range []string{"$JS.", "_R_.", "_GR_.", "$GR."} {
		if strings.HasPrefix(reply, prefix) {
			return true
		}
	}
	return false
}

// beat keeps the runners alive in the registry, and takes their heartbeats out of the watchers.
func (s *scene) beat(t *testing.T) {
	t.Helper()
	s.accept(t, 3, func() {
		for _, r := range []*runner{s.a1, s.a2, s.b1} {
			r.beat(t)
		}
	})
	s.beaten = time.Now()
	s.listen(t)
}

// keepAlive is beat when it is time for one, and tells whether it was: who is silent for a minute is forgotten, whatever the tests take.
func (s *scene) keepAlive(t *testing.T) bool {
	t.Helper()
	due := time.Since(s.beaten) > 5*time.Second
	if due {
		s.beat(t)
	}
	return due
}

// isPolled tells what the control plane asks a1 itself, on its own subject, whatever it subscribes.
func (s *scene) isPolled(m *nats.Msg) bool {
	return m.Subject == schemas.ControlSubject(s.a1.ref, s.a1.session) && isHealthPoll(m)
}

// readNames are the names of the streams in the account of a connection.
func readNames(t *testing.T, c *client) []string {
	t.Helper()
	js, err := natsjs.New(c.Conn, natsjs.WithDefaultTimeout(stack.Patience))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	list := js.StreamNames(t.Context())
	for name := range list.Name() {
		names = append(names, name)
	}
	if err := list.Err(); err != nil {
		t.Fatal(err)
	}
	slices.Sort(names)
	return names
}
