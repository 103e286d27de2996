package bus

import (
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// A draft is what a small dispatch has to say from its acceptance on, as long as all of it may leave in one frame: nothing of it has
// a number yet. It lasts until the stream lingers no more (lingerFor), until something comes that has no place in it, or until Finish
// makes a RunnerWorkWhole of it. All methods are called with the lock held.

// mostNoted is the most progress in a draft, mostWholeChunk the most bytes of a chunk: the frame fits into a bundle.
const (
	mostNoted      = mostProgress
	mostWholeChunk = 8 << 10
)

// Holds reports whether a last chunk of n bytes may be held back for Finish, since everything could leave in one frame with it.
func (s *Sender) Holds(n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.draft != nil && n <= mostWholeChunk
}

// begin begins a draft with the acceptance.
func (s *Sender) begin(f *runbusv1.RunnerWorkAccepted) {
	s.out.prepare()
	m := s.out.memory
	s.draft = &m.draft
	s.accepter = f.Pid
	if at := f.At; at != nil {
		m.at.Seconds, m.at.Nanos = at.Seconds, at.Nanos
		s.draft.AcceptedAt = &m.at
	}
}

// note takes a progress into the draft, if there is room.
func (s *Sender) note(f *runbusv1.RunnerWorkProgress) bool {
	if len(s.draft.Updates) >= mostNoted || f.Update == nil || proto.Size(f.Update) > bundleBytes/mostNoted/4 {
		return false
	}
	s.draft.Updates = append(s.draft.Updates, proto.CloneOf(f.Update))
	return true
}

// settle makes frames of the draft, if there is one.
func (s *Sender) settle() {
	if s.draft == nil || s.err != nil {
		return
	}
	accepted := &runbusv1.RunnerWorkAccepted{Pid: s.accepter}
	if at := s.draft.AcceptedAt; at != nil {
		accepted.At = &timestamppb.Timestamp{Seconds: at.Seconds, Nanos: at.Nanos}
	}
	updates := s.draft.Updates
	s.dropDraft()
	s.whole = false
	err := s.take(accepted, 0)
	for _, u := range updates {
		if err == nil {
			err = s.take(&runbusv1.RunnerWorkProgress{Update: u}, 0)
		}
	}
	if err != nil { // each was one of this stream a moment ago
		s.err = err
	}
}

// dropDraft forgets the draft.
func (s *Sender) dropDraft() {
	if d := s.draft; d != nil {
		d.DispatchId, d.Session, d.Seq, d.AcceptedAt, d.Updates = "", "", 0, nil, nil
		d.ArrowIpc, d.Response, d.RestXxh3 = nil, nil, nil
		s.draft = nil
	}
}

// finish takes the last frames: as one with the draft if they fit in there.
func (s *Sender) finish(last *runbusv1.RunnerWorkChunk, result *runbusv1.RunnerWorkResult) error {
	n := chunkBytes(last)
	if n > ChunkBytes {
		return schemas.Errorf(schemas.CodeInvalid, "a chunk has %d bytes, over %d", n, ChunkBytes)
	}
	if s.draft != nil && s.err == nil && s.completes(last, result) {
		d := s.draft
		d.ArrowIpc, d.Response, d.RestXxh3 = last.GetArrowIpc(), result.GetResponse(), result.RestXxh3
		s.draft = nil // it is none any more for take
		err := s.take(d, n)
		s.draft = d
		s.dropDraft()
		return err
	}
	if last != nil {
		if err := s.take(last, n); err != nil {
			return err
		}
	}
	return s.take(result, 0)
}

// completes reports whether a RunnerWorkWhole would say all that these say.
func (s *Sender) completes(last *runbusv1.RunnerWorkChunk, result *runbusv1.RunnerWorkResult) bool {
	r := result.GetResponse()
	return r != nil && result.Started && len(result.StreamSha256) == 0 && len(r.Notices) == 0 && r.RunnerPid == s.accepter &&
		(last == nil || len(last.ArrowIpc) > 0 && len(last.ArrowIpc) <= mostWholeChunk && last.Rows == r.Rows && last.Bytes == r.Bytes)
}
