package bus

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

func TestEnvelopeRoundTrip(t *testing.T) {
	in := &runbusv1.RunnerHeartbeat{Session: "5e55", LoadScore: 0.5, SentAt: timestamppb.Now()}
	msg, err := NewMsg("runbus.v1.acme.runner.edge.heartbeat", in)
	if err != nil {
		t.Fatal(err)
	}
	if TypeOf(msg) != "RunnerHeartbeat" || msg.Header.Get("Content-Type") != "application/protobuf" {
		t.Fatalf("headers %v", msg.Header)
	}
	out := &runbusv1.RunnerHeartbeat{}
	if err := Decode(msg, out); err != nil || !proto.Equal(in, out) {
		t.Fatalf("decoded %v, %v", out, err)
	}
	other, err := DecodeAny(TypeOf(msg), msg.Data)
	if err != nil || !proto.Equal(in, other) {
		t.Fatalf("decoded %v, %v", other, err)
	}
}

func TestDecodeRefuses(t *testing.T) {
	body, err := proto.Marshal(&runbusv1.RunnerGoodbye{Session: "5e55"})
	if err != nil {
		t.Fatal(err)
	}
	envelope := func(name, content string, data []byte) *nats.Msg {
		h := nats.Header{}
		if name != "" {
			h.Set(HeaderType, name)
		}
		if content != "" {
			h.Set(HeaderContentType, content)
		}
		return &nats.Msg{Header: h, Data: data}
	}
	for name, msg := range map[string]*nats.Msg{
		"no headers":        {Data: body},
		"no type":           envelope("", ContentType, body),
		"another type":      envelope("RunnerHello", ContentType, body),
		"the full name":     envelope("runbus.v1.RunnerGoodbye", ContentType, body),
		"another content":   envelope("RunnerGoodbye", "application/json", body),
		"oversize":          envelope("RunnerGoodbye", ContentType, make([]byte, MaxPayload+1)),
		"not protobuf":      envelope("RunnerGoodbye", ContentType, []byte("\xff\xff\xff")),
		"not UTF-8":         envelope("RunnerGoodbye", ContentType, bytes.Replace(body, []byte("5e55"), []byte("5e5\xff"), 1)),
		"cut in the middle": envelope("RunnerGoodbye", ContentType, body[:len(body)-1]),
	} {
		if err := Decode(msg, &runbusv1.RunnerGoodbye{}); schemas.CodeOf(err) != schemas.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := Decode(envelope("RunnerGoodbye", ContentType, body), &runbusv1.RunnerGoodbye{}); err != nil {
		t.Errorf("the right one: %v", err)
	}
	for _, name := range []string{"", "Nobody", "google.protobuf.Timestamp", "runbus.v1.RunnerHello", ".RunnerHello", "RunnerHello.X", "Timestamp"} {
		if m, err := DecodeAny(name, nil); schemas.CodeOf(err) != schemas.CodeInvalid {
			t.Errorf("%q: %v, %v", name, m, err)
		}
	}
	if _, err := DecodeAny("RunnerHello", make([]byte, MaxPayload+1)); schemas.CodeOf(err) != schemas.CodeInvalid {
		t.Errorf("oversize: %v", err)
	}
}

func TestNewMsgRefusesWhatWouldNotFit(t *testing.T) {
	m := &runbusv1.RunnerWorkAssignment{Request: &runbusv1.RunFetchRequest{Query: strings.Repeat("x", MaxPayload)}}
	if _, err := NewMsg("s", m); schemas.CodeOf(err) != schemas.CodeLimit {
		t.Fatalf("a message over the limit: %v", err)
	}
}

// Every message of the contract is known by its short name.
func TestDecodeAnyKnowsTheContract(t *testing.T) {
	n := 0
	for _, m := range []proto.Message{&runbusv1.RunnerHello{}, &runbusv1.RunnerWorkChunk{}, &runbusv1.RunFetchRequest{}, &runbusv1.AuditBatch{}} {
		messages := m.ProtoReflect().Descriptor().ParentFile().Messages()
		for i := range messages.Len() {
			name := string(messages.Get(i).Name())
			if got, err := DecodeAny(name, nil); err != nil || shortName(got) != name {
				t.Errorf("%s: %v, %v", name, got, err)
			}
			n++
		}
	}
	if n < 20 {
		t.Fatalf("only %d messages were found", n)
	}
}

func FuzzDecode(f *testing.F) {
	ok, err := proto.Marshal(&runbusv1.RunnerHello{RunnerId: "edge", Capabilities: []string{"fetch"}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add("RunnerHello", ok)
	f.Add("RunnerHello", []byte{0xff})
	f.Add("", ok)
	f.Fuzz(func(t *testing.T, name string, body []byte) {
		msg := &nats.Msg{Header: nats.Header{HeaderType: {name}}, Data: body}
		into := &runbusv1.RunnerHello{}
		err := Decode(msg, into)
		if err != nil && schemas.CodeOf(err) != schemas.CodeInvalid {
			t.Fatalf("an error without its code: %v", err)
		}
		if err == nil && name != "RunnerHello" {
			t.Fatalf("a %q was decoded as a RunnerHello", name)
		}
		m, err := DecodeAny(name, body)
		if err != nil && schemas.CodeOf(err) != schemas.CodeInvalid {
			t.Fatalf("an error without its code: %v", err)
		}
		if err == nil && shortName(m) != name {
			t.Fatalf("a %q was decoded as %s", name, shortName(m))
		}
	})
}

func FuzzDecodeFrame(f *testing.F) {
	for _, one := range []Frame{
		&runbusv1.RunnerWorkAccepted{Seq: 1}, &runbusv1.RunnerWorkProgress{Seq: 2},
		&runbusv1.RunnerWorkChunk{Seq: 3, ArrowIpc: []byte("arrow")}, &runbusv1.RunnerWorkResult{Seq: 4},
		&runbusv1.RunnerWorkWhole{Seq: 1, ArrowIpc: []byte("arrow")}, &runbusv1.RunnerWorkWhole{Seq: 2},
	} {
		body, err := proto.Marshal(one)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(shortName(one), body, true)
		f.Add(shortName(one), body, false)
	}
	f.Fuzz(func(t *testing.T, name string, body []byte, data bool) {
		kind := schemas.KindResultCtl
		if data {
			kind = schemas.KindResultData
		}
		if name == framesName {
			return // FuzzDecodeFrames
		}
		frames, err := decodeFrames(&nats.Msg{Header: nats.Header{HeaderType: {name}}, Data: body}, kind, nil)
		if err != nil {
			if schemas.CodeOf(err) != schemas.CodeInvalid {
				t.Fatalf("an error without its code: %v", err)
			}
			return
		}
		if len(frames) != 1 {
			t.Fatalf("taken as %d frames", len(frames))
		}
		frame := joined(frames[0])
		if frame.GetSeq() == 0 || shortName(frame) != name || chunkBytes(frame) > ChunkBytes || frameKind(frame) != kind {
			t.Fatalf("taken as a frame: %s %v", name, frame)
		}
	})
}

// joined is the frame that was decoded: of a RunnerWorkWhole, which is taken apart, what its parts say.
func joined(f sizedFrame) Frame {
	w := f.whole
	if w == nil {
		return f.frame
	}
	whole := &runbusv1.RunnerWorkWhole{
		DispatchId: w.result.GetDispatchId(), Session: w.result.GetSession(), Seq: w.result.GetSeq(), AcceptedAt: w.accepted.GetAt(),
		ArrowIpc: w.chunk.GetArrowIpc(), Response: w.result.GetResponse(), RestXxh3: w.result.GetRestXxh3(),
	}
	for _, p := range w.progress {
		whole.Updates = append(whole.Updates, p.GetUpdate())
	}
	return whole
}

// The bundle is read by hand: it is what protobuf sees in it, or it is refused.
func FuzzDecodeFrames(f *testing.F) {
	var body []byte
	for i, one := range []Frame{
		&runbusv1.RunnerWorkAccepted{}, &runbusv1.RunnerWorkProgress{Update: &runbusv1.RunFetchUpdate{Message: "x"}},
		&runbusv1.RunnerWorkChunk{ArrowIpc: []byte("arrow")}, &runbusv1.RunnerWorkResult{Started: true},
		&runbusv1.RunnerWorkWhole{
			AcceptedAt: timestamppb.Now(), ArrowIpc: []byte("arrow"), RestXxh3: []byte("sum"), Updates: []*runbusv1.RunFetchUpdate{{Message: "x"}, {}},
			Response: &runbusv1.RunFetchResponse{Rows: 1, Bytes: 2, RunnerPid: 3},
		},
	} {
		if err := stamp(one, "d", "s", uint64(i%4+1)); err != nil {
			f.Fatal(err)
		}
		e, _, err := encodeFrame(nil, one)
		if err != nil {
			f.Fatal(err)
		}
		body = append(body, e.entry...)
		f.Add(slices.Clone(body), true)
		f.Add(slices.Clone(body), false)
	}
	f.Add([]byte{0x9a, 0x0a, 0x02, 0xa2, 0x0a}, true)
	f.Fuzz(func(t *testing.T, body []byte, data bool) {
		kind := schemas.KindResultCtl
		if data {
			kind = schemas.KindResultData
		}
		got, err := decodeFrames(&nats.Msg{Header: frameHeaders[framesName], Data: body}, kind, nil)
		if err != nil {
			if schemas.CodeOf(err) != schemas.CodeInvalid {
				t.Fatalf("an error without its code: %v", err)
			}
			return
		}
		want := &runbusv1.RunnerWorkFrames{}
		if err := proto.Unmarshal(body, want); err != nil || len(want.GetFrames()) != len(got) {
			t.Fatalf("%d frames taken of %v: %v", len(got), want, err)
		}
		for i, one := range want.GetFrames() {
			var f Frame
			switch one := one.GetFrame().(type) {
			case *runbusv1.RunnerWorkFrame_Accepted:
				f = one.Accepted
			case *runbusv1.RunnerWorkFrame_Progress:
				f = one.Progress
			case *runbusv1.RunnerWorkFrame_Chunk:
				f = one.Chunk
			case *runbusv1.RunnerWorkFrame_Result:
				f = one.Result
			case *runbusv1.RunnerWorkFrame_Whole:
				one.Whole.ProtoReflect().SetUnknown(nil)
				f = one.Whole
			}
			if f == nil || !proto.Equal(f, joined(got[i])) || f.GetSeq() == 0 || chunkBytes(f) > ChunkBytes || !data && frameKind(f) == schemas.KindResultData {
				t.Fatalf("taken as frame %d: %v, which is %v", i, joined(got[i]), one)
			}
		}
	})
}
