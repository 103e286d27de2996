package dispatch

import (
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"pgregory.net/rapid"

	"github.com/org-runink/runbus/cp/registry"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// The assignment is written by hand; protobuf's own reader must see in it what was meant, a field of a later version in the
// caller's request included.
func TestAssignmentIsProtobuf(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.StringMatching(`[ -~é]{0,40}`)
		number := rapid.Int64Range(0, 1<<62)
		fetch := &runbusv1.RunFetchRequest{
			Source: &runbusv1.Source{Kind: text.Draw(t, "kind"), Settings: rapid.MapOf(text, text).Draw(t, "settings")},
			Query:  text.Draw(t, "query"), MaxRows: number.Draw(t, "rows"), MaxBytes: number.Draw(t, "bytes"),
		}
		if rapid.Bool().Draw(t, "source is later") {
			fetch.Source.ProtoReflect().SetUnknown(protowire.AppendString(protowire.AppendTag(nil, 1001, protowire.BytesType), "new"))
		}
		if rapid.Bool().Draw(t, "later") {
			fetch.ProtoReflect().SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 1000, protowire.VarintType), 7))
		}
		before := proto.CloneOf(fetch)
		at := func(name string) time.Time {
			return time.Unix(rapid.Int64Range(0, 1<<34).Draw(t, name), rapid.Int64Range(0, 999_999_999).Draw(t, name+"ns"))
		}
		acceptBy, deadline := at("accept"), at("deadline")
		r := &run{facts: facts{
			id: text.Draw(t, "id"), runner: &registry.Candidate{Session: text.Draw(t, "session")}, replica: text.Draw(t, "replica"),
			fetch: fetch, sized: measure(fetch), deadline: deadline, secrets: rapid.MapOf(text, text).Draw(t, "secrets"),
		}}
		window := number.Draw(t, "window")
		body, err := r.assignment(acceptBy, window)
		if err != nil {
			t.Fatal(err)
		}
		got := &runbusv1.RunnerWorkAssignment{}
		if err := proto.Unmarshal(body, got); err != nil {
			t.Fatal(err)
		}
		asked := proto.CloneOf(before)
		asked.MaxRows, asked.MaxBytes = limit(before.GetMaxRows(), MaxRows), limit(before.GetMaxBytes(), MaxBytes)
		want := &runbusv1.RunnerWorkAssignment{
			DispatchId: r.id, Session: r.runner.Session, Request: asked, Replica: r.replica, WindowBytes: window,
			AcceptBy: timestamppb.New(acceptBy), Deadline: timestamppb.New(deadline), CredentialsFollow: len(r.secrets) > 0,
		}
		if !proto.Equal(got, want) {
			t.Fatalf("read as %v, not %v", got, want)
		}
		if !proto.Equal(fetch, before) {
			t.Fatal("the caller's request was changed")
		}
	})
}

func TestAssignmentIsOfTexts(t *testing.T) {
	for name, fetch := range map[string]*runbusv1.RunFetchRequest{
		"kind":    {Source: &runbusv1.Source{Kind: "\xff"}},
		"name":    {Source: &runbusv1.Source{Settings: map[string]string{"\xff": ""}}},
		"setting": {Source: &runbusv1.Source{Settings: map[string]string{"path": "\xff"}}},
		"query":   {Query: "\xff"},
	} {
		r := &run{facts: facts{runner: &nobody, fetch: fetch, sized: measure(fetch)}}
		if _, err := r.assignment(time.Unix(0, 0), window); err == nil {
			t.Errorf("%s: written though it is not UTF-8", name)
		}
	}
}
