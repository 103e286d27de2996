package bus

import (
	"bytes"
	"testing"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// What is written by hand has the bytes that protobuf would write.
func TestFramesAreWrittenAsProtobufDoes(t *testing.T) {
	long := bytes.Repeat([]byte("arrow"), 10_000)
	for _, f := range []Frame{
		&runbusv1.RunnerWorkAccepted{}, &runbusv1.RunnerWorkAccepted{DispatchId: "d", Session: "s", Seq: 1, Pid: -1, At: &timestamppb.Timestamp{Seconds: -1 << 62, Nanos: -5}},
		&runbusv1.RunnerWorkAccepted{Seq: 300, At: &timestamppb.Timestamp{}},
		&runbusv1.RunnerWorkProgress{}, &runbusv1.RunnerWorkProgress{Seq: 1, Update: &runbusv1.RunFetchUpdate{}},
		&runbusv1.RunnerWorkProgress{Seq: 1, Update: &runbusv1.RunFetchUpdate{
			Phase: -1, Message: string(long[:300]), Rows: -1, Bytes: -1, Done: true, At: &timestamppb.Timestamp{Seconds: -1, Nanos: -1},
		}},
		&runbusv1.RunnerWorkProgress{DispatchId: "d", Seq: 2, Update: &runbusv1.RunFetchUpdate{Message: "x"}},
		&runbusv1.RunnerWorkChunk{}, &runbusv1.RunnerWorkChunk{DispatchId: "d", Session: "s", Seq: 1 << 40, ArrowIpc: long, Rows: 1 << 62, Bytes: -3},
		&runbusv1.RunnerWorkResult{}, &runbusv1.RunnerWorkResult{Started: true, StreamSha256: long[:32]},
		&runbusv1.RunnerWorkResult{Seq: 3, Outcome: &runbusv1.RunnerWorkResult_Response{}},
		&runbusv1.RunnerWorkResult{Seq: 3, Outcome: &runbusv1.RunnerWorkResult_Response{Response: &runbusv1.RunFetchResponse{}}},
		&runbusv1.RunnerWorkResult{DispatchId: "d", Session: "s", Seq: 3, Started: true, Outcome: &runbusv1.RunnerWorkResult_Response{Response: &runbusv1.RunFetchResponse{
			Rows: -1, Bytes: -1, WireBytes: -1, RunnerPid: -1, Elapsed: &durationpb.Duration{Seconds: -1, Nanos: -1},
		}}},
		&runbusv1.RunnerWorkResult{Outcome: &runbusv1.RunnerWorkResult_Response{Response: &runbusv1.RunFetchResponse{Notices: []*runbusv1.Notice{{Message: "x"}}}}},
		&runbusv1.RunnerWorkWhole{}, &runbusv1.RunnerWorkWhole{Seq: 1, Response: &runbusv1.RunFetchResponse{}},
		&runbusv1.RunnerWorkWhole{DispatchId: "d", Session: "s", Seq: 1, AcceptedAt: &timestamppb.Timestamp{Seconds: -1, Nanos: -1}, ArrowIpc: long, RestXxh3: long[:16],
			Updates:  []*runbusv1.RunFetchUpdate{{}, {Message: string(long[:300]), At: &timestamppb.Timestamp{}}},
			Response: &runbusv1.RunFetchResponse{Rows: -1, Bytes: -1, WireBytes: -1, RunnerPid: -1, Elapsed: &durationpb.Duration{Seconds: -1, Nanos: -1}}},
		&runbusv1.RunnerWorkWhole{Seq: 1, Response: &runbusv1.RunFetchResponse{Notices: []*runbusv1.Notice{{Message: "x"}}}},
		&runbusv1.RunnerWorkResult{Outcome: &runbusv1.RunnerWorkResult_Error{Error: &runbusv1.ErrorDetail{Code: "failed"}}},
	} {
		want, err := proto.MarshalOptions{Deterministic: true}.Marshal(f)
		if err != nil {
			t.Fatal(err)
		}
		e, used, err := encodeFrame(nil, f)
		if err != nil || used != 0 {
			t.Fatal(used, err)
		}
		for _, room := range []int{entryRoom, entryRoom + frameRoom, 4 << 10} {
			memory := make([]byte, room+1)
			again, used, err := encodeFrame(memory[:room], f)
			if err != nil || !bytes.Equal(again.entry, e.entry) || again.body != e.body || again.field != e.field {
				t.Errorf("%v in %d bytes of memory: %v, %v", f, room, again, err)
			}
			if used > room || used > 0 && &memory[used-1] != &again.entry[len(again.entry)-1] {
				t.Errorf("%v in %d bytes of memory is said to use %d of them", f, room, used)
			}
		}
		if got := e.entry[e.body:]; !bytes.Equal(got, want) {
			t.Errorf("%v is written as % x, not % x", f, got, want)
		}
		all := &runbusv1.RunnerWorkFrames{}
		if err := proto.Unmarshal(e.entry, all); err != nil || len(all.GetFrames()) != 1 {
			t.Errorf("%v in its entry: %v, %v", f, all, err)
		}
		header, body := alone(e.entry)
		if header.Get(HeaderType) != shortName(f) || !bytes.Equal(body, want) {
			t.Errorf("%v alone: %v, % x", f, header, body)
		}
	}
	for _, c := range []credit{
		{}, {dispatch: "d", session: "s", acknowledged: 300, window: 1 << 40, resend: true}, {dispatch: string(long[:100]), session: string(long[:100])}, {window: -1},
	} {
		want, err := proto.MarshalOptions{Deterministic: true}.Marshal(&runbusv1.RunnerWorkCredits{Credits: []*runbusv1.RunnerWorkCredit{c.message()}})
		if err != nil {
			t.Fatal(err)
		}
		if got := appendCredit(nil, c); !bytes.Equal(got, want) {
			t.Errorf("%+v is written as % x, not % x", c, got, want)
		}
	}
}

// Assignments are what protobuf sees in them, or they are refused.
func FuzzAssignments(f *testing.F) {
	full := &runbusv1.RunnerWorkAssignment{
		DispatchId: "d", Session: "s", Replica: "c", AcceptBy: timestamppb.Now(), Deadline: timestamppb.Now(), CredentialsFollow: true, WindowBytes: 5, Bundles: true, Together: true, Xxh3: true, Xxh3Whole: true, ChunksTell: true, Whole: true,
		Traceparent: "00-1", Tracestate: "a=b", Request: &runbusv1.RunFetchRequest{
			Source: &runbusv1.Source{Kind: "file", Settings: map[string]string{"path": "x", "": "y"}}, Query: "q", MaxRows: 1, MaxBytes: 2,
		},
	}
	for _, list := range [][]*runbusv1.RunnerWorkAssignment{{}, {{}}, {full}, {full, {DispatchId: "e", Session: "s"}, full}} {
		for _, settled := range [][]string{{}, {"c"}, {"c", "", "d"}} {
			body, err := proto.Marshal(&runbusv1.RunnerWorkAssignments{Assignments: list, Settled: settled})
			if err != nil {
				f.Fatal(err)
			}
			f.Add(body, true)
		}
		body, err := proto.Marshal(full)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(body, false)
	}
	f.Fuzz(func(t *testing.T, body []byte, several bool) {
		name := "RunnerWorkAssignment"
		if several {
			name += "s"
		}
		var got []*runbusv1.RunnerWorkAssignment
		msg := &nats.Msg{Header: nats.Header{HeaderType: {name}}, Data: body}
		var settled []string
		readSettled(msg, func(dispatch []byte) { settled = append(settled, string(dispatch)) })
		err := Assignments(msg, func(m *runbusv1.RunnerWorkAssignment, _ Trace) { got = append(got, proto.CloneOf(m)) })
		if err != nil {
			if schemas.CodeOf(err) != schemas.CodeInvalid || len(got) > 0 {
				t.Fatalf("an error without its code, or %d assignments with it: %v", len(got), err)
			}
			return
		}
		want := &runbusv1.RunnerWorkAssignments{}
		if !several {
			body = protowire.AppendBytes(protowire.AppendTag(nil, assignmentsNumber, protowire.BytesType), body)
		}
		if err := proto.Unmarshal(body, want); err != nil || !proto.Equal(want, &runbusv1.RunnerWorkAssignments{Assignments: got, Settled: settled}) {
			t.Fatalf("read as %v, which is %v, %v", got, want, err)
		}
	})
}

// Credits are what protobuf sees in them, or they are refused.
func FuzzCredits(f *testing.F) {
	f.Add(appendCredit(appendCredit(nil, credit{dispatch: "d", session: "s", acknowledged: 3}), credit{dispatch: "e", session: "s", window: -1, resend: true}))
	f.Add([]byte{0xc2, 0x0a, 0x03, 0x0a, 0x01, 0xff})
	f.Fuzz(func(t *testing.T, body []byte) {
		got := &runbusv1.RunnerWorkCredits{}
		err := readCredits(&nats.Msg{Header: frameHeaders["RunnerWorkCredits"], Data: body}, func(dispatch []byte, c credit) {
			c.dispatch = string(dispatch)
			got.Credits = append(got.Credits, c.message())
		})
		if err != nil {
			if schemas.CodeOf(err) != schemas.CodeInvalid {
				t.Fatalf("an error without its code: %v", err)
			}
			return
		}
		want := &runbusv1.RunnerWorkCredits{}
		if err := proto.Unmarshal(body, want); err != nil || len(want.GetCredits()) != len(got.GetCredits()) {
			t.Fatalf("read as %v, which is %v, %v", got, want, err)
		}
		for i, one := range want.GetCredits() {
			if one.ProtoReflect().SetUnknown(nil); !proto.Equal(one, got.GetCredits()[i]) {
				t.Fatalf("read as %v, which is %v", got.GetCredits()[i], one)
			}
		}
	})
}
