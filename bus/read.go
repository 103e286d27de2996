package bus

import (
	"math"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

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
		result  runbusv1.RunnerWorkResult
		outcome runbusv1.RunnerWorkResult_Response
		*responseParts
	}
	responseParts struct { // apart: the caller of a fetch gets it
		response runbusv1.RunFetchResponse
		elapsed  durationpb.Duration
		sum      [16]byte
	}
)

// parts is memory for the frames that every dispatch has one of, so that reading them makes no object of each.
type parts struct {
	accepted acceptedParts
	chunk    runbusv1.RunnerWorkChunk
	result   resultParts
	whole    whole

	acceptedUsed, chunkUsed, resultUsed, wholeUsed bool
}

func (p *parts) forAccepted() *acceptedParts {
	if p == nil || p.acceptedUsed {
		return &acceptedParts{}
	}
	p.acceptedUsed = true
	p.accepted = acceptedParts{}
	return &p.accepted
}

func (p *parts) forChunk() *runbusv1.RunnerWorkChunk {
	if p == nil || p.chunkUsed {
		return &runbusv1.RunnerWorkChunk{}
	}
	p.chunkUsed = true
	p.chunk = runbusv1.RunnerWorkChunk{}
	return &p.chunk
}

func (p *parts) forResult() *resultParts {
	if p == nil || p.resultUsed {
		return &resultParts{responseParts: &responseParts{}}
	}
	p.resultUsed = true
	p.result = resultParts{responseParts: &responseParts{}}
	return &p.result
}

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

// chunk leaves Arrow where it lies, in the memory of body.
func (n *names) chunk(body []byte, m *runbusv1.RunnerWorkChunk) bool {
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
			m.StreamSha256 = append([]byte{}, f.bytes...)
		case f.is(resultXxh3Number, protowire.BytesType):
			m.RestXxh3 = append(parts.sum[:0], f.bytes...)
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
