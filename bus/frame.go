package bus

import (
	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Frame is one numbered message of a result stream: *RunnerWorkAccepted, *RunnerWorkProgress, *RunnerWorkChunk or
// *RunnerWorkResult, and no other type; between Sender and Receiver a *RunnerWorkWhole as well.
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
	case *runbusv1.RunnerWorkWhole:
		f.DispatchId, f.Session, f.Seq = dispatch, session, seq
	default:
		return schemas.Errorf(schemas.CodeInvalid, "%s is not a frame of a result", shortName(f))
	}
	return nil
}

// frameKind is the kind of subject a frame travels on.
func frameKind(f Frame) schemas.Kind {
	if hasRows(fieldOf(f)) {
		return schemas.KindResultData
	}
	return schemas.KindResultCtl
}

// hasRows reports whether frames of a field of RunnerWorkFrame have rows: they go to the data subject, where ops sees nothing.
func hasRows(field protowire.Number) bool { return field == chunkNumber || field == wholeNumber }

// chunkBytes is what a frame takes of the window.
func chunkBytes(f Frame) int64 {
	switch f := f.(type) {
	case *runbusv1.RunnerWorkChunk:
		return int64(len(f.GetArrowIpc()))
	case *runbusv1.RunnerWorkWhole:
		return int64(len(f.GetArrowIpc()))
	}
	return 0
}

// frameHeaders are the envelopes of frames, bundles and assignments. Nobody changes them, so each is there once.
var frameHeaders = func() map[string]nats.Header {
	headers := make(map[string]nats.Header)
	for _, m := range []proto.Message{
		(*runbusv1.RunnerWorkAccepted)(nil), (*runbusv1.RunnerWorkProgress)(nil), (*runbusv1.RunnerWorkChunk)(nil),
		(*runbusv1.RunnerWorkResult)(nil), (*runbusv1.RunnerWorkWhole)(nil), (*runbusv1.RunnerWorkFrames)(nil), (*runbusv1.RunnerWorkCredits)(nil), (*runbusv1.RunnerWorkCredit)(nil),
		(*runbusv1.RunnerWorkAssignment)(nil), (*runbusv1.RunnerWorkAssignments)(nil),
	} {
		name := shortName(m)
		headers[name] = nats.Header{HeaderType: {name}, HeaderContentType: {ContentType}}
	}
	return headers
}()

// encoded is one frame as it is kept and sent: an entry of RunnerWorkFrames, whose tail is the frame by itself.
type encoded struct {
	entry []byte
	body  int32        // where in entry the frame begins
	large *largeMemory // which has entry; nil for other memory
	field protowire.Number
}

// size is that of the entry.
func (e encoded) size() int { return len(e.entry) }

// entryRoom is what the tags and lengths around a frame take at most.
const entryRoom = 12

// frameRoom is what a frame takes besides the bytes of a chunk, in most cases.
const frameRoom = 160

// encodeFrame encodes a frame, at the beginning of memory if it has the room: then used is how much of it the frame has taken. One that
// does not fit into a message is an error of CodeLimit.
func encodeFrame(memory []byte, f Frame) (e encoded, used int, err error) {
	shared := int64(len(memory)) >= entryRoom+frameRoom+chunkBytes(f)
	if !shared {
		memory, e.large = roomFor(chunkBytes(f))
	}
	buf, err := appendFrame(memory[:entryRoom], f)
	if err != nil {
		return encoded{}, 0, schemas.Wrap(schemas.CodeInvalid, err, "a frame can't be encoded")
	}
	size := len(buf) - entryRoom
	if size > MaxPayload-headerRoom {
		return encoded{}, 0, schemas.Errorf(schemas.CodeLimit, "%s of %d bytes is over the %d bytes of the bus", shortName(f), size, MaxPayload-headerRoom)
	}
	switch {
	case len(buf) > len(memory): // append has moved it
		e.large = nil
	case shared:
		used = len(buf)
		buf = buf[:used:used]
	}
	e.field = fieldOf(f)
	var room [entryRoom]byte
	head := protowire.AppendTag(room[:0], framesNumber, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(protowire.SizeTag(e.field)+protowire.SizeBytes(size)))
	head = protowire.AppendTag(head, e.field, protowire.BytesType)
	head = protowire.AppendVarint(head, uint64(size))
	e.entry, e.body = buf[entryRoom-len(head):], int32(len(head))
	copy(e.entry, head)
	return e, used, nil
}

// fieldOf is the number of a frame's field in RunnerWorkFrame.
func fieldOf(f Frame) protowire.Number {
	switch f.(type) {
	case *runbusv1.RunnerWorkAccepted:
		return acceptedNumber
	case *runbusv1.RunnerWorkProgress:
		return progressNumber
	case *runbusv1.RunnerWorkChunk:
		return chunkNumber
	case *runbusv1.RunnerWorkWhole:
		return wholeNumber
	}
	return resultNum
}

// frameNames are the types of frames, by their field in RunnerWorkFrame.
var frameNames = map[protowire.Number]string{
	acceptedNumber: "RunnerWorkAccepted", progressNumber: "RunnerWorkProgress", chunkNumber: "RunnerWorkChunk", resultNum: "RunnerWorkResult",
	wholeNumber: "RunnerWorkWhole",
}

// fieldNamed is the number of the field for frames of a type, 0 for any other type.
func fieldNamed(name string) protowire.Number {
	for number, n := range frameNames {
		if n == name {
			return number
		}
	}
	return 0
}

// bundleBytes is the most that frames in one bundle have together: it leaves in one TLS record. Larger ones keep those waiting whose
// frames are ready, but where so many streams are open that there is always more: bundles of frames of several streams have up to
// manyBytes then (measured: at 256 in flight a tenth less processor time for 60 KiB and 4 % less again for 120, no more for 180; at 64 a tenth
// more).
const (
	bundleBytes = 15 << 10
	manyBytes   = 120 << 10
	manyStreams = 128
)

// framesName is the type of bundles.
const framesName = "RunnerWorkFrames"

// alone takes the only frame out of the body of a bundle: header and body of its own message.
func alone(body []byte) (nats.Header, []byte) {
	one, _, _ := field(body, framesNumber) // of our own making
	number, _, _ := protowire.ConsumeTag(one)
	frame, _, _ := field(one, number)
	return frameHeaders[frameNames[number]], frame
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
	if w, ok := f.(*runbusv1.RunnerWorkWhole); ok {
		switch {
		case w.GetSeq() != 1:
			return errNotWhole(w.GetSeq())
		case len(w.GetUpdates()) > mostUpdates:
			return errUpdates()
		}
	}
	if chunkBytes(f) > ChunkBytes {
		return schemas.Errorf(schemas.CodeInvalid, "a chunk has %d bytes, over %d", chunkBytes(f), ChunkBytes)
	}
	return nil
}
