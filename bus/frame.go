package bus

import (
	"github.com/nats-io/nats.go"
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
	if f.GetSeq() == 0 {
		return nil, schemas.Errorf(schemas.CodeInvalid, "a %s has no number", shortName(f))
	}
	if chunkBytes(f) > ChunkBytes {
		return nil, schemas.Errorf(schemas.CodeInvalid, "a chunk has %d bytes, over %d", chunkBytes(f), ChunkBytes)
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
