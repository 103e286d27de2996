package bus

import (
	"slices"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Frame is one numbered message of a result stream: *RunnerWorkAccepted, *RunnerWorkProgress, *RunnerWorkChunk or
// *RunnerWorkResult, and no other type.
type Frame interface {
	proto.Message
	GetDispatchId() string
	GetSession() string
	GetSeq() uint64
}

// stamp writes the stream's identity and the number into a frame. A type that is no frame is an error of CodeInvalid.
func stamp(f Frame, dispatch, session string, seq uint64) error {
	switch f := f.(type) {
	case *runbusv1.RunnerWorkAccepted:
		f.DispatchId, f.Session, f.Seq = dispatch, session, seq
	case *runbusv1.RunnerWorkProgress:
		f.DispatchId, f.Session, f.Seq = dispatch, session, seq
	case *runbusv1.RunnerWorkChunk:
		f.DispatchId, f.Session, f.Seq = dispatch, session, seq
	case *runbusv1.RunnerWorkResult:
		f.DispatchId, f.Session, f.Seq = dispatch, session, seq
	default:
		return schemas.Errorf(schemas.CodeInvalid, "%s is not a frame of a result", shortName(f))
	}
	return nil
}

// decodeFrame reads a frame from the kind of subject on which its type may come: chunks on data, the others on ctl.
func decodeFrame(msg *nats.Msg, kind schemas.Kind) (Frame, error) {
	var f Frame
	switch TypeOf(msg) {
	case "RunnerWorkAccepted":
		f = &runbusv1.RunnerWorkAccepted{}
	case "RunnerWorkProgress":
		f = &runbusv1.RunnerWorkProgress{}
	case "RunnerWorkChunk":
		f = &runbusv1.RunnerWorkChunk{}
	case "RunnerWorkResult":
		f = &runbusv1.RunnerWorkResult{}
	default:
		return nil, schemas.Errorf(schemas.CodeInvalid, "%q is not a frame of a result", clip(TypeOf(msg)))
	}
	if want := frameKind(f); kind != want {
		return nil, schemas.Errorf(schemas.CodeInvalid, "a %s came on a subject for others", shortName(f))
	}
	if err := Decode(msg, f); err != nil {
		return nil, err
	}
	if err := checkFrame(f); err != nil {
		return nil, err
	}
	return f, nil
}

// frameKind is the kind of subject a frame travels on.
func frameKind(f Frame) schemas.Kind {
	if _, ok := f.(*runbusv1.RunnerWorkChunk); ok {
		return schemas.KindResultData
	}
	return schemas.KindResultCtl
}

// chunkBytes is what a frame takes of the window.
func chunkBytes(f Frame) int64 {
	c, _ := f.(*runbusv1.RunnerWorkChunk)
	return int64(len(c.GetArrowIpc()))
}

// frameHeaders are the envelopes of frames and bundles. Nobody changes them, so each is there once.
var frameHeaders = func() map[string]nats.Header {
	headers := make(map[string]nats.Header)
	for _, m := range []proto.Message{
		(*runbusv1.RunnerWorkAccepted)(nil), (*runbusv1.RunnerWorkProgress)(nil), (*runbusv1.RunnerWorkChunk)(nil),
		(*runbusv1.RunnerWorkResult)(nil), (*runbusv1.RunnerWorkFrames)(nil), (*runbusv1.RunnerWorkCredits)(nil), (*runbusv1.RunnerWorkCredit)(nil),
	} {
		name := shortName(m)
		headers[name] = nats.Header{HeaderType: {name}, HeaderContentType: {ContentType}}
	}
	return headers
}()

// newFrame is NewMsg for a frame.
func newFrame(subject string, f Frame) (*nats.Msg, error) {
	body, err := proto.Marshal(f)
	if err != nil {
		return nil, schemas.Wrap(schemas.CodeInvalid, err, "a frame can't be encoded")
	}
	if len(body) > MaxPayload-headerRoom {
		return nil, schemas.Errorf(schemas.CodeLimit, "%s of %d bytes is over the %d bytes of the bus", shortName(f), len(body), MaxPayload-headerRoom)
	}
	return &nats.Msg{Subject: subject, Header: frameHeaders[shortName(f)], Data: body}, nil
}

// Numbers of the fields of RunnerWorkFrames, RunnerWorkFrame and RunnerWorkCredits.
const (
	framesField                                           = 163
	acceptedField, progressField, chunkField, resultField = 164, 165, 166, 167
	creditsField                                          = 168
)

// bundleBytes is the most that frames in one bundle have together: larger ones gain nothing by it.
const bundleBytes = 64 << 10

// bundle puts frames of one dispatch, encoded, into one message. Its body begins at the beginning of memory, if that is large enough.
func bundle(ctl, data string, frames []*nats.Msg, memory []byte) *nats.Msg {
	size := 0
	subject := ctl
	for _, f := range frames {
		size += len(f.Data) + 16
	}
	body := slices.Grow(memory[:0], size)
	for _, f := range frames {
		field := protowire.Number(progressField)
		switch TypeOf(f) {
		case "RunnerWorkAccepted":
			field = acceptedField
		case "RunnerWorkChunk":
			field, subject = chunkField, data
		case "RunnerWorkResult":
			field = resultField
		}
		inner := protowire.SizeTag(field) + protowire.SizeBytes(len(f.Data))
		body = protowire.AppendTag(body, framesField, protowire.BytesType)
		body = protowire.AppendVarint(body, uint64(inner))
		body = protowire.AppendTag(body, field, protowire.BytesType)
		body = protowire.AppendBytes(body, f.Data)
	}
	return &nats.Msg{Subject: subject, Header: frameHeaders["RunnerWorkFrames"], Data: body}
}

// sizedFrame is a frame and the bytes that it was encoded in.
type sizedFrame struct {
	frame Frame
	size  int64
}

// decodeFrames reads what came on a subject of kind: one frame, or a bundle. All frames of a bundle are valid, or it is not.
func decodeFrames(msg *nats.Msg, kind schemas.Kind, into []sizedFrame) ([]sizedFrame, error) {
	if TypeOf(msg) != "RunnerWorkFrames" {
		f, err := decodeFrame(msg, kind)
		if err != nil {
			return nil, err
		}
		return append(into, sizedFrame{f, int64(len(msg.Data))}), nil
	}
	if ct := msg.Header.Get(HeaderContentType); ct != "" && ct != ContentType {
		return nil, schemas.Errorf(schemas.CodeInvalid, "the RunnerWorkFrames has content type %q, not %s", clip(ct), ContentType)
	}
	// Read by hand: protobuf's own reader would make two more objects of each frame, and forget how large it was.
	for body := msg.Data; len(body) > 0; {
		one, rest, err := field(body, framesField)
		if err != nil {
			return nil, err
		}
		body = rest
		var f Frame
		number, _, _ := protowire.ConsumeTag(one)
		switch number {
		case acceptedField:
			f = &runbusv1.RunnerWorkAccepted{}
		case progressField:
			f = &runbusv1.RunnerWorkProgress{}
		case chunkField:
			f = &runbusv1.RunnerWorkChunk{}
		case resultField:
			f = &runbusv1.RunnerWorkResult{}
		default:
			return nil, errNoFrame()
		}
		encoded, rest, err := field(one, number)
		if err != nil {
			return nil, err
		}
		if len(rest) > 0 {
			return nil, errNoFrame()
		}
		if frameKind(f) == schemas.KindResultData && kind != schemas.KindResultData {
			return nil, schemas.Errorf(schemas.CodeInvalid, "a %s came on a subject for others", shortName(f))
		}
		if err := unmarshal("RunnerWorkFrames", encoded, f); err != nil {
			return nil, err
		}
		if err := checkFrame(f); err != nil {
			return nil, err
		}
		into = append(into, sizedFrame{f, int64(len(encoded))})
	}
	return into, nil
}

func errNoFrame() *schemas.Error {
	return schemas.Errorf(schemas.CodeInvalid, "a bundle has something that is not a frame of a result")
}

// field takes one length-delimited field of the given number off b.
func field(b []byte, number protowire.Number) (value, rest []byte, err error) {
	got, kind, n := protowire.ConsumeTag(b)
	if n < 0 || got != number || kind != protowire.BytesType {
		return nil, nil, errNoFrame()
	}
	value, m := protowire.ConsumeBytes(b[n:])
	if m < 0 {
		return nil, nil, errNoFrame()
	}
	return value, b[n+m:], nil
}

// checkFrame refuses what no sender makes.
func checkFrame(f Frame) error {
	if f.GetSeq() == 0 {
		return schemas.Errorf(schemas.CodeInvalid, "a %s has no number", shortName(f))
	}
	if chunkBytes(f) > ChunkBytes {
		return schemas.Errorf(schemas.CodeInvalid, "a chunk has %d bytes, over %d", chunkBytes(f), ChunkBytes)
	}
	return nil
}
