package audit

import (
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
)

// A beginning is an event of its own unless its end comes before it is written; it stands before what is recorded behind it.
func TestBegin(t *testing.T) {
	b := bustest.Start(t)
	s := openStore(t, b, b.Conn(t, embedded.UserSec))
	l := newLog(t, b, s, "one")
	event := func(action, subject string) *Brief {
		return &Brief{Tenant: "acme", Actor: "person:wanda", Action: action, Subject: subject, Outcome: "ok", Details: []Detail{{Name: "a", Value: "b"}}}
	}
	var short, long, recorded Opening
	l.Begin(&short, event("begin", "short"))
	l.End(&short, event("end", "short"))
	l.Begin(&short, event("begin", "again"))
	l.Begin(&recorded, event("begin", "recorded"))
	if l.openings.count != 2 || l.notes != 1 {
		t.Fatalf("%d beginnings wait, and %d notes", l.openings.count, l.notes)
	}
	stop := run(t, l)
	read := Event("person:wanda", "read", "recorded", "ok")
	read.Tenant = "acme"
	if err := l.Record(t.Context(), read); err != nil {
		t.Fatal(err)
	}
	l.End(&recorded, event("end", "recorded"))
	l.Begin(&long, event("begin", "long"))
	give := time.After(3 * time.Minute)
	for written := false; !written; {
		events, err := l.List(t.Context(), "acme", 100)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range events {
			written = written || e.GetAction() == "begin" && e.GetSubject() == "long" && e.GetDetails()["a"] == "b"
		}
		select {
		case <-give:
			t.Fatal("a beginning whose end doesn't come is not written")
		default:
		}
	}
	l.End(&long, event("end", "long"))
	l.Begin(&long, event("begin", "last"))
	stop() // which writes what waits
	var got []string
	events, err := l.List(t.Context(), "acme", 100)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events {
		got = append(got, e.GetAction()+" "+e.GetSubject())
	}
	want := []string{
		"end short", "begin again", "begin recorded", "read recorded", "end recorded", "begin long", "end long", "begin last",
	}
	if len(got) != len(want) {
		t.Fatalf("%q, not %q", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("%q, not %q", got, want)
		}
	}
	if l.Begin(&long, event("begin", "late")); l.openings.count != 0 || l.dropped != 1 {
		t.Errorf("after the end %d beginnings wait, and %d were dropped", l.openings.count, l.dropped)
	}
}

// The beginning that is due first wakes who writes, whatever waits for longer than it.
func TestBeginWakes(t *testing.T) {
	b := bustest.Start(t)
	l := newLog(t, b, openStore(t, b, b.Conn(t, embedded.UserSec)), "one")
	l.Jot(&Brief{Tenant: "acme", Actor: "person:wanda", Action: "other"})
	<-l.wake
	var first, second Opening
	l.Begin(&first, &Brief{Tenant: "acme", Actor: "person:wanda", Action: "begin", At: time.Now().Add(-noteWait + time.Millisecond)})
	select {
	case <-l.wake:
	default:
		t.Error("who writes is not told of a beginning that is due before what waits already")
	}
	if l.Begin(&second, &Brief{Tenant: "acme", Actor: "person:wanda", Action: "begin"}); len(l.wake) != 0 {
		t.Error("who writes is woken for a beginning that another is due before")
	}
}

// What is noted at the last moment, once, is written.
func TestAtClose(t *testing.T) {
	b := bustest.Start(t)
	l := newLog(t, b, openStore(t, b, b.Conn(t, embedded.UserSec)), "one")
	var o Opening
	l.AtClose(func() { l.Begin(&o, &Brief{Tenant: "acme", Actor: "person:wanda", Action: "begin"}) })
	l.AtClose(func() { l.Jot(&Brief{Tenant: "acme", Actor: "person:wanda", Action: "last"}) })
	run(t, l)()
	events, err := l.List(t.Context(), "acme", 100)
	if err != nil || len(events) != 2 || events[0].GetAction() != "last" || events[1].GetAction() != "begin" {
		t.Fatalf("%v, %v", events, err)
	}
}

// What an end says is written as every event is, whatever the ends before it said.
func TestEndSaysWhatItIs(t *testing.T) {
	words := rapid.SampledFrom([]string{"", "a", "b", "for this action", "µs", "\"", "\xff", strings.Repeat("z", keepText)})
	detail := rapid.Custom(func(t *rapid.T) Detail {
		name := words.Draw(t, "name")
		switch rapid.IntRange(0, 3).Draw(t, "form") {
		case 0:
			return Int(name, rapid.Int64().Draw(t, "number"))
		case 1:
			return Took(name, time.Duration(rapid.Int64().Draw(t, "duration")))
		}
		return Detail{Name: name, Value: words.Draw(t, "value")}
	})
	rapid.Check(t, func(t *rapid.T) {
		var o Opening
		for range rapid.IntRange(1, 6).Draw(t, "ends") {
			e := Brief{
				Tenant: words.Draw(t, "tenant"), Actor: words.Draw(t, "actor"), Action: words.Draw(t, "action"), Subject: words.Draw(t, "subject"), Outcome: words.Draw(t, "outcome"),
				Details: rapid.SliceOfN(detail, 0, 8).Draw(t, "details"),
			}
			want, failed := appendRest(nil, &e)
			if got, err := o.write(&e); string(got) != string(want) || (err == nil) != (failed == nil) {
				t.Fatalf("%q (%v), not %q (%v)", got, err, want, failed)
			}
		}
	})
}
