package bus

import (
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// whole is a RunnerWorkWhole as the frames that it stands for, all of which have its number.
type whole struct {
	accepted *runbusv1.RunnerWorkAccepted
	progress []*runbusv1.RunnerWorkProgress
	chunk    *runbusv1.RunnerWorkChunk // without bytes: there was none
	result   *runbusv1.RunnerWorkResult

	acceptedParts *acceptedParts
	resultParts   *resultParts
}

// mostUpdates is the most progress in a RunnerWorkWhole that is taken: a sender has mostNoted, and each costs far more here than it took
// on its way.
const mostUpdates = 16

func errUpdates() *schemas.Error {
	return schemas.Errorf(schemas.CodeInvalid, "a RunnerWorkWhole has more than %d updates", mostUpdates)
}

func errNotWhole(seq uint64) *schemas.Error {
	return schemas.Errorf(schemas.CodeInvalid, "a RunnerWorkWhole is the only frame of its dispatch, and says that it is number %d", seq)
}

// forWhole is memory for a RunnerWorkWhole.
func (p *parts) forWhole() *whole {
	var w *whole
	if p != nil && !p.wholeUsed {
		p.wholeUsed = true
		w = &p.whole
	} else {
		w = new(whole)
	}
	*w = whole{acceptedParts: p.forAccepted(), chunk: p.forChunk(), resultParts: p.forResult()}
	w.accepted, w.result = &w.acceptedParts.accepted, &w.resultParts.result
	return w
}

// name says whose the frames are.
func (w *whole) name(dispatch, session string) {
	w.accepted.DispatchId, w.accepted.Session, w.accepted.Seq = dispatch, session, 1
	for _, p := range w.progress {
		p.DispatchId, p.Session, p.Seq = dispatch, session, 1
	}
	w.chunk.DispatchId, w.chunk.Session, w.chunk.Seq = dispatch, session, 1
	w.result.DispatchId, w.result.Session, w.result.Seq = dispatch, session, 1
	w.result.Started = true
	if r := w.result.GetResponse(); r != nil {
		w.accepted.Pid = r.RunnerPid
		w.chunk.Rows, w.chunk.Bytes = r.Rows, r.Bytes
	}
}

// check refuses what no sender makes.
func (w *whole) check(seq uint64) error {
	switch {
	case seq != 1:
		return errNotWhole(seq)
	case len(w.progress) > mostUpdates:
		return errUpdates()
	}
	return checkFrame(w.chunk)
}

// checkUpdates refuses an encoded RunnerWorkWhole with more than mostUpdates. What is not protobuf is left to who reads it.
func checkUpdates(body []byte) error {
	for updates := 0; len(body) > 0; {
		number, kind, n := protowire.ConsumeTag(body)
		if n < 0 {
			return nil
		}
		size := protowire.ConsumeFieldValue(number, kind, body[n:])
		if size < 0 {
			return nil
		}
		if number == wholeUpdatesNumber && kind == protowire.BytesType {
			updates++
		}
		if updates > mostUpdates {
			return errUpdates()
		}
		body = body[n+size:]
	}
	return nil
}

// appendTo appends the frames that come before the result.
func (w *whole) appendTo(frames []Frame) []Frame {
	frames = append(frames, w.accepted)
	for _, p := range w.progress {
		frames = append(frames, p)
	}
	if len(w.chunk.ArrowIpc) > 0 {
		frames = append(frames, w.chunk)
	}
	return frames
}

// read reads the fields behind the identity, up to one update too many. It returns false for what is not as we write it.
func (w *whole) read(body []byte) bool {
	f := fields{rest: body}
	for f.next() {
		ok := true
		switch {
		case f.kind != protowire.BytesType:
			return false
		case f.number == wholeAtNumber && w.accepted.At == nil:
			w.accepted.At = &w.acceptedParts.at
			ok = f.timestamp(w.accepted.At)
		case f.number == wholeUpdatesNumber:
			p := &progressParts{}
			p.progress.Update = &p.update
			w.progress = append(w.progress, &p.progress)
			if len(w.progress) > mostUpdates {
				return true // for check
			}
			ok = readUpdate(f.bytes, &p.update, &p.at)
		case f.number == wholeArrowNumber:
			w.chunk.ArrowIpc = f.bytes[:len(f.bytes):len(f.bytes)]
		case f.number == wholeResponseNumber && w.result.Outcome == nil:
			parts := w.resultParts
			parts.outcome.Response = &parts.response
			w.result.Outcome = &parts.outcome
			ok = readResponse(f.bytes, &parts.response, &parts.elapsed)
		case f.number == wholeXxh3Number:
			w.result.RestXxh3 = append(w.resultParts.sum[:0], f.bytes...)
		default:
			return false
		}
		if !ok {
			return false
		}
	}
	return f.ok
}

// split makes frames of a RunnerWorkWhole that protobuf has read.
func split(m *runbusv1.RunnerWorkWhole) (Frame, *whole) {
	w := &whole{
		accepted: &runbusv1.RunnerWorkAccepted{At: m.GetAcceptedAt()},
		chunk:    &runbusv1.RunnerWorkChunk{ArrowIpc: m.GetArrowIpc()},
		result:   &runbusv1.RunnerWorkResult{RestXxh3: m.GetRestXxh3()},
	}
	if r := m.GetResponse(); r != nil {
		w.result.Outcome = &runbusv1.RunnerWorkResult_Response{Response: r}
	}
	for _, u := range m.GetUpdates() {
		w.progress = append(w.progress, &runbusv1.RunnerWorkProgress{Update: u})
	}
	w.name(m.GetDispatchId(), m.GetSession())
	return w.result, w
}
