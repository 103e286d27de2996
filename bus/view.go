package bus

import (
	"unicode/utf8"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// view is one frame where it lies in a message: who it is of and its number are read, the rest is when it is known who wants it.
type view struct {
	field             protowire.Number // in RunnerWorkFrame
	dispatch, session []byte
	seq               uint64
	rest              []byte // its fields behind these
	body              []byte // all of it
	frame             Frame  // the frame, of one that does not begin with these
}

// sizedFrame is a frame and the bytes that it was encoded in.
type sizedFrame struct {
	frame Frame
	size  int64
	whole *whole // what comes before frame, a result, if it came as a RunnerWorkWhole
	lent  lender // lends its bytes; nil: they are its own
}

// chunkBytes is what it takes of the window.
func (f sizedFrame) chunkBytes() int64 {
	if f.whole != nil {
		return chunkBytes(f.whole.chunk)
	}
	return chunkBytes(f.frame)
}

// shareAbove is from how many bytes on a piece of Arrow shares the memory of its message, if most of that is the piece. A message of
// at most shareWithin bytes is always shared, by frames that don't wait for long.
const shareAbove, shareWithin = 16 << 10, 16 << 10

// viewFrames looks at what came on a subject of kind: one frame, or a bundle. All frames of a bundle are where they belong and have
// a number, or it is an error; what is in them shows when they are decoded.
func viewFrames(msg *nats.Msg, kind schemas.Kind, into []view) ([]view, error) {
	name := TypeOf(msg)
	if ct := msg.Header.Get(HeaderContentType); ct != "" && ct != ContentType {
		return nil, schemas.Errorf(schemas.CodeInvalid, "the %s has content type %q, not %s", clip(name), clip(ct), ContentType)
	}
	if len(msg.Data) > MaxPayload {
		return nil, schemas.Errorf(schemas.CodeInvalid, "the %s has %d bytes, over the %d of the bus", clip(name), len(msg.Data), MaxPayload)
	}
	if name != framesName {
		number := fieldNamed(name)
		if number == 0 {
			return nil, schemas.Errorf(schemas.CodeInvalid, "%q is not a frame of a result", clip(name))
		}
		if hasRows(number) != (kind == schemas.KindResultData) {
			return nil, schemas.Errorf(schemas.CodeInvalid, "a %s came on a subject for others", name)
		}
		v, err := viewOf(number, msg.Data)
		if err != nil {
			return nil, err
		}
		return append(into, v), nil
	}
	entries := fields{rest: msg.Data}
	for entries.next() {
		if !entries.is(framesNumber, protowire.BytesType) {
			return nil, errNoFrame()
		}
		one := fields{rest: entries.bytes}
		if !one.next() || one.kind != protowire.BytesType || len(one.rest) > 0 {
			return nil, errNoFrame()
		}
		if hasRows(one.number) && kind != schemas.KindResultData {
			return nil, schemas.Errorf(schemas.CodeInvalid, "rows came on a subject for others")
		}
		v, err := viewOf(one.number, one.bytes)
		if err != nil {
			return nil, err
		}
		into = append(into, v)
	}
	if !entries.ok {
		return nil, errNoFrame()
	}
	return into, nil
}

// viewOf looks at an encoded frame of a field of RunnerWorkFrame.
func viewOf(field protowire.Number, body []byte) (view, error) {
	v := view{field: field, body: body}
	b, ok := prefixed(body, dispatchNumber<<3|byte(protowire.BytesType), &v.dispatch)
	if ok {
		b, ok = prefixed(b, sessionNumber<<3|byte(protowire.BytesType), &v.session)
	}
	if ok && len(b) > 1 && b[0] == seqNumber<<3|byte(protowire.VarintType) {
		var n int
		if v.seq, n = shortVarint(b[1:]); n > 0 && v.seq > 0 && fieldNames(field) {
			v.rest = b[1+n:]
			return v, nil
		}
	}
	// Not as we write it: protobuf says what it is.
	f, err := readFrame(field, body)
	if err != nil {
		return view{}, err
	}
	return view{
		field: field, dispatch: []byte(f.GetDispatchId()), session: []byte(f.GetSession()), seq: f.GetSeq(), body: body, frame: f,
	}, nil
}

// prefixed takes a short text off b that begins with tag.
func prefixed(b []byte, tag byte, text *[]byte) (rest []byte, ok bool) {
	if len(b) < 2 || b[0] != tag || b[1] >= 0x80 || len(b) < 2+int(b[1]) {
		return b, false
	}
	end := 2 + int(b[1])
	*text = b[2:end]
	return b[end:], true
}

// fieldNames reports whether a field of RunnerWorkFrame is one of a frame.
func fieldNames(field protowire.Number) bool {
	return field >= acceptedNumber && field <= resultNum || field == wholeNumber
}

// decode reads the frame. p, which may be nil, has memory for it; n keeps what frames have in common. Arrow is left in the memory of
// the message, which has whole bytes, if share is true for a small one, or if most of it is that piece.
func (v *view) decode(n *names, p *parts, whole int, share bool) (sizedFrame, error) {
	f := sizedFrame{frame: v.frame, size: int64(len(v.body))}
	var err error
	if f.frame == nil {
		f.frame, f.whole, err = v.read(n, p, whole, share)
	}
	if w, ok := f.frame.(*runbusv1.RunnerWorkWhole); ok && err == nil {
		f.frame, f.whole = split(w)
	}
	return f, err
}

// read is decode for a frame that begins as we write it. A RunnerWorkWhole may come as it is, or in parts.
func (v *view) read(n *names, p *parts, whole int, share bool) (Frame, *whole, error) {
	if !same(&n.dispatch, v.dispatch) || !same(&n.session, v.session) {
		return nil, nil, schemas.Errorf(schemas.CodeInvalid, "the id in a frame is not UTF-8")
	}
	dispatch, session := n.dispatch, n.session
	var f Frame
	var ok bool
	switch v.field {
	case acceptedNumber:
		m := p.forAccepted()
		m.accepted.DispatchId, m.accepted.Session, m.accepted.Seq = dispatch, session, v.seq
		f, ok = &m.accepted, n.accepted(v.rest, m)
	case progressNumber:
		m := &progressParts{}
		m.progress.DispatchId, m.progress.Session, m.progress.Seq = dispatch, session, v.seq
		f, ok = &m.progress, n.progress(v.rest, m)
	case chunkNumber:
		m := p.forChunk()
		m.DispatchId, m.Session, m.Seq = dispatch, session, v.seq
		f, ok = m, n.chunk(v.rest, m)
		m.ArrowIpc = own(m.ArrowIpc, whole, share)
	case wholeNumber:
		if w := p.forWhole(); w.read(v.rest) {
			w.name(dispatch, session)
			w.chunk.ArrowIpc = own(w.chunk.ArrowIpc, whole, share)
			return w.result, w, w.check(v.seq)
		}
		f = &runbusv1.RunnerWorkWhole{}
	default:
		m := p.forResult()
		m.result.DispatchId, m.result.Session, m.result.Seq = dispatch, session, v.seq
		f, ok = &m.result, n.result(v.rest, m)
	}
	if !ok {
		if err := unmarshalFrame(v.body, f); err != nil { // which begins with a reset
			return nil, nil, err
		}
	}
	if f.GetDispatchId() != dispatch || f.GetSession() != session || f.GetSeq() != v.seq {
		return nil, nil, schemas.Errorf(schemas.CodeInvalid, "a %s says twice, and not the same, whose it is", shortName(f))
	}
	return f, nil, checkFrame(f)
}

// own is a piece of Arrow in a message of whole bytes, or a copy of it where the message should not be kept for it.
func own(piece []byte, whole int, share bool) []byte {
	if len(piece) > 0 && (!share || whole > shareWithin) && (len(piece) < shareAbove || len(piece) < whole/2) {
		copied := make([]byte, len(piece)) // which append would clear beyond its length
		copy(copied, piece)
		return copied
	}
	return piece
}

// same makes text what b says, without a new string if it does already. It returns false for what is not UTF-8.
func same(text *string, b []byte) bool {
	if *text == string(b) {
		return true
	}
	*text = string(b)
	return utf8.ValidString(*text)
}

// decodeFrames is viewFrames, and decodes all.
func decodeFrames(msg *nats.Msg, kind schemas.Kind, into []sizedFrame) ([]sizedFrame, error) {
	var few [8]view
	views, err := viewFrames(msg, kind, few[:0])
	if err != nil {
		return nil, err
	}
	var known names
	for i := range views {
		f, err := views[i].decode(&known, nil, len(msg.Data), false)
		if err != nil {
			return nil, err
		}
		into = append(into, f)
	}
	return into, nil
}

// readFrame has protobuf itself read an encoded frame.
func readFrame(number protowire.Number, body []byte) (Frame, error) {
	var f Frame
	switch number {
	case acceptedNumber:
		f = &runbusv1.RunnerWorkAccepted{}
	case progressNumber:
		f = &runbusv1.RunnerWorkProgress{}
	case chunkNumber:
		f = &runbusv1.RunnerWorkChunk{}
	case resultNum:
		f = &runbusv1.RunnerWorkResult{}
	case wholeNumber:
		f = &runbusv1.RunnerWorkWhole{}
	default:
		return nil, errNoFrame()
	}
	if err := unmarshalFrame(body, f); err != nil {
		return nil, err
	}
	return f, checkFrame(f)
}

// unmarshalFrame is unmarshal for a frame. It makes nothing of a RunnerWorkWhole with too many updates.
func unmarshalFrame(body []byte, f Frame) error {
	if fieldOf(f) == wholeNumber {
		if err := checkUpdates(body); err != nil {
			return err
		}
	}
	return unmarshal(shortName(f), body, f)
}
