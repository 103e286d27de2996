package bus

import (
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

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
	assignmentOneNumber                                    = 97
	framesNumber                                           = 163
	acceptedNumber, progressNumber, chunkNumber, resultNum = 164, 165, 166, 167
	creditsNumber, assignmentsNumber, settledNumber        = 168, 169, 186
	wholeNumber, wholeAtNumber, wholeUpdatesNumber         = 180, 181, 182
	wholeArrowNumber, wholeResponseNumber, wholeXxh3Number = 183, 184, 185
)

// appendTag and appendVarint are protowire's, faster where one or two bytes will do, as they mostly do here.
func appendTag(b []byte, n protowire.Number, kind protowire.Type) []byte {
	return appendVarint(b, uint64(n)<<3|uint64(kind))
}

func appendVarint(b []byte, v uint64) []byte {
	switch {
	case v < 1<<7:
		return append(b, byte(v))
	case v < 1<<14:
		return append(b, byte(v)|0x80, byte(v>>7))
	}
	return protowire.AppendVarint(b, v)
}

func appendString(b []byte, n protowire.Number, s string) []byte {
	if s == "" {
		return b
	}
	return append(appendVarint(appendTag(b, n, protowire.BytesType), uint64(len(s))), s...)
}

func appendBytes(b []byte, n protowire.Number, v []byte) []byte {
	if len(v) == 0 {
		return b
	}
	return append(appendVarint(appendTag(b, n, protowire.BytesType), uint64(len(v))), v...)
}

func appendUint(b []byte, n protowire.Number, v uint64) []byte {
	if v == 0 {
		return b
	}
	return appendVarint(appendTag(b, n, protowire.VarintType), v)
}

func appendInt(b []byte, n protowire.Number, v int64) []byte { return appendUint(b, n, uint64(v)) }

func appendBool(b []byte, n protowire.Number, v bool) []byte {
	return appendUint(b, n, protowire.EncodeBool(v))
}

// appendClock writes a Timestamp or a Duration.
func appendClock(b []byte, n protowire.Number, seconds int64, nanos int32) []byte {
	b = appendTag(b, n, protowire.BytesType)
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
				b = appendUpdate(b, progressUpdateNumber, f.Update)
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
			return appendResponse(b, resultResponseNumber, response.Response), nil
		case *runbusv1.RunnerWorkWhole:
			if f.Response == nil || len(f.Response.Notices) > 0 {
				break
			}
			b = appendIdentity(b, f.DispatchId, f.Session, f.Seq)
			if at := f.AcceptedAt; at != nil {
				b = appendClock(b, wholeAtNumber, at.Seconds, at.Nanos)
			}
			for _, u := range f.Updates {
				b = appendUpdate(b, wholeUpdatesNumber, u)
			}
			b = appendResponse(appendBytes(b, wholeArrowNumber, f.ArrowIpc), wholeResponseNumber, f.Response)
			return appendBytes(b, wholeXxh3Number, f.RestXxh3), nil
		}
	}
	return proto.MarshalOptions{}.MarshalAppend(b, f)
}

// appendUpdate writes an update as field n.
func appendUpdate(b []byte, n protowire.Number, u *runbusv1.RunFetchUpdate) []byte {
	var room [160]byte
	inner := appendInt(room[:0], 1, int64(u.Phase))
	inner = appendString(inner, 2, u.Message)
	inner = appendInt(appendInt(inner, 3, u.Rows), 4, u.Bytes)
	inner = appendBool(inner, 5, u.Done)
	if at := u.At; at != nil {
		inner = appendClock(inner, 6, at.Seconds, at.Nanos)
	}
	return append(appendVarint(appendTag(b, n, protowire.BytesType), uint64(len(inner))), inner...)
}

// appendResponse writes a response, which has no notices, as field n.
func appendResponse(b []byte, n protowire.Number, r *runbusv1.RunFetchResponse) []byte {
	b = appendTag(b, n, protowire.BytesType)
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
	tag, n := shortVarint(f.rest)
	if n < 0 || tag>>3 < uint64(protowire.MinValidNumber) || tag>>3 > uint64(protowire.MaxValidNumber) {
		return false
	}
	f.rest, f.number, f.kind = f.rest[n:], protowire.Number(tag>>3), protowire.Type(tag&7)
	value, n := shortVarint(f.rest)
	if n < 0 {
		return false
	}
	f.rest = f.rest[n:]
	switch f.kind {
	case protowire.VarintType:
		f.varint = value
		return true
	case protowire.BytesType:
		if value > uint64(len(f.rest)) {
			return false
		}
		f.bytes, f.rest = f.rest[:value], f.rest[value:]
		return true
	}
	return false
}

// shortVarint is protowire.ConsumeVarint, faster where the number has one or two bytes, as most have here.
func shortVarint(b []byte) (v uint64, n int) {
	switch {
	case len(b) > 0 && b[0] < 0x80:
		return uint64(b[0]), 1
	case len(b) > 1 && b[1] < 0x80:
		return uint64(b[0]&0x7f) | uint64(b[1])<<7, 2
	}
	return protowire.ConsumeVarint(b)
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

// names are the last dispatch, session, replica and kind of source read: what comes together mostly has them in common, and then one string
// will do.
type names struct{ dispatch, session, replica, kind string }

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
