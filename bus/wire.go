package bus

import (
	"math"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// The messages of which there are several in every dispatch are written and read by hand, which takes a third of the time that
// protobuf's own tables take. The bytes are protobuf's: a field that these readers do not expect makes them give the whole message
// to protobuf, and fuzz tests hold both to the same.

// Numbers of fields: those that messages share, and those of one each.
const (
	dispatchNumber, sessionNumber, seqNumber = 1, 2, 3

	acceptedPidNumber, acceptedAtNumber                              = 104, 105
	progressUpdateNumber                                             = 114
	chunkArrowNumber, chunkRowsNumber, chunkBytesNumber              = 124, 125, 126
	resultResponseNumber, resultStartedNumber, resultSha256Number    = 134, 136, 137
	resultXxh3Number, assignmentXxh3Number                           = 138, 94
	creditAcknowledgedNumber, creditWindowNumber, creditResendNumber = 153, 154, 155

	assignmentBundlesNumber, assignmentTogetherNumber      = 89, 90
	assignmentParentNumber, assignmentStateNumber          = 91, 92
	assignmentWholeNumber, assignmentTellNumber            = 95, 96
	framesNumber                                           = 163
	acceptedNumber, progressNumber, chunkNumber, resultNum = 164, 165, 166, 167
	creditsNumber, assignmentsNumber                       = 168, 169
)

func appendString(b []byte, n protowire.Number, s string) []byte {
	if s == "" {
		return b
	}
	return protowire.AppendString(protowire.AppendTag(b, n, protowire.BytesType), s)
}

func appendBytes(b []byte, n protowire.Number, v []byte) []byte {
	if len(v) == 0 {
		return b
	}
	return protowire.AppendBytes(protowire.AppendTag(b, n, protowire.BytesType), v)
}

func appendUint(b []byte, n protowire.Number, v uint64) []byte {
	if v == 0 {
		return b
	}
	return protowire.AppendVarint(protowire.AppendTag(b, n, protowire.VarintType), v)
}

func appendInt(b []byte, n protowire.Number, v int64) []byte { return appendUint(b, n, uint64(v)) }

func appendBool(b []byte, n protowire.Number, v bool) []byte {
	return appendUint(b, n, protowire.EncodeBool(v))
}

// appendClock writes a Timestamp or a Duration.
func appendClock(b []byte, n protowire.Number, seconds int64, nanos int32) []byte {
	b = protowire.AppendTag(b, n, protowire.BytesType)
	b = append(b, 0)
	at := len(b)
	b = appendInt(appendInt(b, 1, seconds), 2, int64(nanos))
	b[at-1] = byte(len(b) - at) // at most 22
	return b
}

func appendIdentity(b []byte, dispatch, session string, seq uint64) []byte {
	return appendUint(appendString(appendString(b, dispatchNumber, dispatch), sessionNumber, session), seqNumber, seq)
}

// appendFrame writes a frame as protobuf does.
func appendFrame(b []byte, f Frame) ([]byte, error) {
	if len(f.ProtoReflect().GetUnknown()) == 0 {
		switch f := f.(type) {
		case *runbusv1.RunnerWorkAccepted:
			b = appendIdentity(b, f.DispatchId, f.Session, f.Seq)
			b = appendInt(b, acceptedPidNumber, f.Pid)
			if at := f.At; at != nil {
				b = appendClock(b, acceptedAtNumber, at.Seconds, at.Nanos)
			}
			return b, nil
		case *runbusv1.RunnerWorkProgress:
			b = appendIdentity(b, f.DispatchId, f.Session, f.Seq)
			if f.Update != nil {
				b = appendUpdate(b, f.Update)
			}
			return b, nil
		case *runbusv1.RunnerWorkChunk:
			b = appendIdentity(b, f.DispatchId, f.Session, f.Seq)
			b = appendBytes(b, chunkArrowNumber, f.ArrowIpc)
			return appendInt(appendInt(b, chunkRowsNumber, f.Rows), chunkBytesNumber, f.Bytes), nil
		case *runbusv1.RunnerWorkResult:
			response, ok := f.Outcome.(*runbusv1.RunnerWorkResult_Response)
			if !ok || response.Response == nil || len(response.Response.Notices) > 0 {
				break
			}
			b = appendIdentity(b, f.DispatchId, f.Session, f.Seq)
			b = appendBytes(appendBool(b, resultStartedNumber, f.Started), resultSha256Number, f.StreamSha256)
			b = appendBytes(b, resultXxh3Number, f.RestXxh3)
			return appendResponse(b, response.Response), nil
		}
	}
	return proto.MarshalOptions{}.MarshalAppend(b, f)
}

// appendUpdate writes the update of a progress.
func appendUpdate(b []byte, u *runbusv1.RunFetchUpdate) []byte {
	var room [160]byte
	inner := appendInt(room[:0], 1, int64(u.Phase))
	inner = appendString(inner, 2, u.Message)
	inner = appendInt(appendInt(inner, 3, u.Rows), 4, u.Bytes)
	inner = appendBool(inner, 5, u.Done)
	if at := u.At; at != nil {
		inner = appendClock(inner, 6, at.Seconds, at.Nanos)
	}
	return protowire.AppendBytes(protowire.AppendTag(b, progressUpdateNumber, protowire.BytesType), inner)
}

// appendResponse writes the response of a result; it has no notices.
func appendResponse(b []byte, r *runbusv1.RunFetchResponse) []byte {
	b = protowire.AppendTag(b, resultResponseNumber, protowire.BytesType)
	b = append(b, 0)
	at := len(b)
	b = appendInt(appendInt(appendInt(b, 1, r.Rows), 2, r.Bytes), 3, r.WireBytes)
	b = appendInt(b, 5, r.RunnerPid)
	if e := r.Elapsed; e != nil {
		b = appendClock(b, 6, e.Seconds, e.Nanos)
	}
	b[at-1] = byte(len(b) - at) // at most 68
	return b
}

// fields walks over the fields of an encoded message. It ends with ok false when the bytes are not protobuf.
type fields struct {
	rest   []byte
	number protowire.Number
	kind   protowire.Type
	varint uint64
	bytes  []byte
	ok     bool
}

// next takes the next varint or length-delimited field; everything else is not ok.
func (f *fields) next() bool {
	if len(f.rest) == 0 {
		f.ok = true
		return false
	}
	number, kind, n := protowire.ConsumeTag(f.rest)
	if n < 0 {
		return false
	}
	f.rest, f.number, f.kind = f.rest[n:], number, kind
	switch kind {
	case protowire.VarintType:
		f.varint, n = protowire.ConsumeVarint(f.rest)
	case protowire.BytesType:
		f.bytes, n = protowire.ConsumeBytes(f.rest)
	default:
		return false
	}
	if n < 0 {
		return false
	}
	f.rest = f.rest[n:]
	return true
}

// is reports whether the field is n of the given kind.
func (f *fields) is(n protowire.Number, kind protowire.Type) bool {
	return f.number == n && f.kind == kind
}

// text is the field as a string, false if it is none; the string that is there already if it is the same.
func (f *fields) text(into *string) bool {
	if f.kind != protowire.BytesType || !utf8.Valid(f.bytes) {
		return false
	}
	if *into != string(f.bytes) {
		*into = string(f.bytes)
	}
	return true
}

// names are the last dispatch, session and replica read: frames that come together mostly have them in common, and then one string will do.
type names struct{ dispatch, session, replica string }

// identity takes the fields that all frames share.
func (n *names) identity(f *fields, dispatch, session *string, seq *uint64) (taken, ok bool) {
	switch f.number {
	case dispatchNumber:
		ok = f.text(&n.dispatch)
		*dispatch = n.dispatch
		return true, ok
	case sessionNumber:
		ok = f.text(&n.session)
		*session = n.session
		return true, ok
	case seqNumber:
		*seq = f.varint
		return true, f.kind == protowire.VarintType
	}
	return false, true
}

// readFrame reads an encoded frame of a field of RunnerWorkFrame. Long pieces of Arrow are not copied if most of whole is that piece.
func (n *names) readFrame(number protowire.Number, body []byte, whole int) (Frame, error) {
	var f Frame
	var err error
	var ok bool
	switch number {
	case acceptedNumber:
		m := &acceptedParts{}
		f, ok = &m.accepted, n.accepted(body, m)
	case progressNumber:
		m := &progressParts{}
		f, ok = &m.progress, n.progress(body, m)
	case chunkNumber:
		m := &runbusv1.RunnerWorkChunk{}
		f, ok = m, n.chunk(body, m, whole)
	case resultNum:
		m := &resultParts{}
		f, ok = &m.result, n.result(body, m)
	default:
		return nil, errNoFrame()
	}
	if !ok {
		err = unmarshal(shortName(f), body, f) // which begins with a reset
	}
	if err == nil {
		err = checkFrame(f)
	}
	return f, err
}

// Frames with what is in them, in one piece of memory.
type (
	acceptedParts struct {
		accepted runbusv1.RunnerWorkAccepted
		at       timestamppb.Timestamp
	}
	progressParts struct {
		progress runbusv1.RunnerWorkProgress
		update   runbusv1.RunFetchUpdate
		at       timestamppb.Timestamp
	}
	resultParts struct {
		result   runbusv1.RunnerWorkResult
		outcome  runbusv1.RunnerWorkResult_Response
		response runbusv1.RunFetchResponse
		elapsed  durationpb.Duration
		sha256   [32]byte
	}
)

func (n *names) accepted(body []byte, parts *acceptedParts) bool {
	m := &parts.accepted
	f := fields{rest: body}
	for f.next() {
		taken, ok := n.identity(&f, &m.DispatchId, &m.Session, &m.Seq)
		switch {
		case !ok:
			return false
		case taken:
		case f.is(acceptedPidNumber, protowire.VarintType):
			m.Pid = int64(f.varint)
		case f.is(acceptedAtNumber, protowire.BytesType) && m.At == nil:
			m.At = &parts.at
			if m.At.Seconds, m.At.Nanos, ok = readClock(f.bytes); !ok {
				return false
			}
		default:
			return false
		}
	}
	return f.ok
}

func (n *names) progress(body []byte, parts *progressParts) bool {
	m := &parts.progress
	f := fields{rest: body}
	for f.next() {
		taken, ok := n.identity(&f, &m.DispatchId, &m.Session, &m.Seq)
		switch {
		case !ok:
			return false
		case taken:
		case f.is(progressUpdateNumber, protowire.BytesType) && m.Update == nil:
			m.Update = &parts.update
			if !readUpdate(f.bytes, m.Update, &parts.at) {
				return false
			}
		default:
			return false
		}
	}
	return f.ok
}

func readUpdate(body []byte, u *runbusv1.RunFetchUpdate, at *timestamppb.Timestamp) bool {
	f := fields{rest: body}
	for f.next() {
		switch {
		case f.is(1, protowire.VarintType):
			u.Phase = runbusv1.Phase(int32(int64(f.varint))) // as protobuf does with what is over 32 bits
		case f.number == 2 && f.text(&u.Message):
		case f.is(3, protowire.VarintType):
			u.Rows = int64(f.varint)
		case f.is(4, protowire.VarintType):
			u.Bytes = int64(f.varint)
		case f.is(5, protowire.VarintType):
			u.Done = protowire.DecodeBool(f.varint)
		case f.is(6, protowire.BytesType) && u.At == nil:
			var ok bool
			u.At = at
			if at.Seconds, at.Nanos, ok = readClock(f.bytes); !ok {
				return false
			}
		default:
			return false
		}
	}
	return f.ok
}

// shareAbove is from how many bytes on a piece of Arrow shares the memory of its message.
const shareAbove = 16 << 10

func (n *names) chunk(body []byte, m *runbusv1.RunnerWorkChunk, whole int) bool {
	f := fields{rest: body}
	for f.next() {
		taken, ok := n.identity(&f, &m.DispatchId, &m.Session, &m.Seq)
		switch {
		case !ok:
			return false
		case taken:
		case f.is(chunkArrowNumber, protowire.BytesType):
			m.ArrowIpc = f.bytes[:len(f.bytes):len(f.bytes)]
		case f.is(chunkRowsNumber, protowire.VarintType):
			m.Rows = int64(f.varint)
		case f.is(chunkBytesNumber, protowire.VarintType):
			m.Bytes = int64(f.varint)
		default:
			return false
		}
	}
	if m.ArrowIpc != nil && (len(m.ArrowIpc) < shareAbove || len(m.ArrowIpc) < whole/2) {
		m.ArrowIpc = append([]byte{}, m.ArrowIpc...)
	}
	return f.ok
}

func (n *names) result(body []byte, parts *resultParts) bool {
	m := &parts.result
	f := fields{rest: body}
	for f.next() {
		taken, ok := n.identity(&f, &m.DispatchId, &m.Session, &m.Seq)
		switch {
		case !ok:
			return false
		case taken:
		case f.is(resultResponseNumber, protowire.BytesType) && m.Outcome == nil:
			parts.outcome.Response = &parts.response
			m.Outcome = &parts.outcome
			if !readResponse(f.bytes, &parts.response, &parts.elapsed) {
				return false
			}
		case f.is(resultStartedNumber, protowire.VarintType):
			m.Started = protowire.DecodeBool(f.varint)
		case f.is(resultSha256Number, protowire.BytesType):
			m.StreamSha256 = append(parts.sha256[:0], f.bytes...)
		case f.is(resultXxh3Number, protowire.BytesType):
			m.RestXxh3 = append([]byte{}, f.bytes...)
		default:
			return false
		}
	}
	return f.ok
}

func readResponse(body []byte, r *runbusv1.RunFetchResponse, elapsed *durationpb.Duration) bool {
	f := fields{rest: body}
	for f.next() {
		switch {
		case f.is(1, protowire.VarintType):
			r.Rows = int64(f.varint)
		case f.is(2, protowire.VarintType):
			r.Bytes = int64(f.varint)
		case f.is(3, protowire.VarintType):
			r.WireBytes = int64(f.varint)
		case f.is(5, protowire.VarintType):
			r.RunnerPid = int64(f.varint)
		case f.is(6, protowire.BytesType) && r.Elapsed == nil:
			var ok bool
			r.Elapsed = elapsed
			if elapsed.Seconds, elapsed.Nanos, ok = readClock(f.bytes); !ok {
				return false
			}
		default:
			return false
		}
	}
	return f.ok
}

// readClock reads a Timestamp or a Duration.
func readClock(body []byte) (seconds int64, nanos int32, ok bool) {
	f := fields{rest: body}
	for f.next() {
		switch {
		case f.is(1, protowire.VarintType):
			seconds = int64(f.varint)
		case f.is(2, protowire.VarintType) && int64(f.varint) >= math.MinInt32 && int64(f.varint) <= math.MaxInt32:
			nanos = int32(int64(f.varint))
		default:
			return 0, 0, false
		}
	}
	return seconds, nanos, f.ok
}
