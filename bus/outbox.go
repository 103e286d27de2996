package bus

import (
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Sizes of a result stream's window: bytes of chunks that may be unacknowledged.
const (
	MinWindow     = 512 << 10
	MaxWindow     = 4 << 20
	DefaultWindow = 1 << 20
)

// mostProgress is how many progress frames may be unacknowledged before new ones are merged into one.
const mostProgress = 4

// outbox is the sending half of a result stream without its input and output: numbers, frames that are not acknowledged,
// window. It is not safe for concurrent use.
type outbox struct {
	frames   []outFrame // numbers acked+1 … last
	memory   *frameMemory
	used     int    // of memory.bytes
	acked    uint64 // the replica has everything up to here
	last     uint64 // highest number given out
	cursor   uint64 // next number to publish; acked < cursor ≤ last+1
	window   int64
	held     int64 // chunk bytes in frames
	progress int   // progress frames in frames
	phases   uint64
	merged   *runbusv1.RunnerWorkProgress // newest progress that waits for room
	final    bool                         // the result is in frames, or acknowledged

	epoch      uint64 // counts the moves of the cursor that a publish under way must not undo, in all streams that had this memory
	publishing uint64 // number of the large frame that is being published without the lock, 0 for none
	stalled    bool   // a publish failed: nothing goes out until resume or credit
	resuming   bool   // nothing goes out until the replica answers a resume
	resumeAt   time.Time
	movedAt    time.Time // of the last acknowledgement, or of the first frame after everything was; at first, of the beginning
	heardAt    time.Time // of the last credit
}

type outFrame struct {
	encoded

	bytes    int64 // of the chunk; 0 for others
	progress bool
}

// frameMemory is what the small frames of a stream are kept in. Streams take turns with it: made anew for each frame it was a third of all
// that a runner allocates (measured, results of 1 KiB). Nobody reads it but with its stream's lock held.
type frameMemory struct {
	frames [8]outFrame
	bytes  [4 << 10]byte
	draft  runbusv1.RunnerWorkWhole
	at     timestamppb.Timestamp // of draft
}

var frameMemories = sync.Pool{New: func() any { return new(frameMemory) }}

// init begins a stream, in memory that may have been another's, which had let go of its frames.
func (o *outbox) init(window int64, now time.Time) {
	*o = outbox{epoch: o.epoch + 1, window: clampWindow(window), cursor: 1, heardAt: now, movedAt: now}
}

// encode encodes a frame for push, in memory if there is room.
func (o *outbox) encode(f Frame) (encoded, error) {
	o.prepare()
	if len(o.frames) == 0 {
		o.used = 0
	}
	e, used, err := encodeFrame(o.memory.bytes[o.used:], f)
	o.used += used
	return e, err
}

// prepare gets the memory.
func (o *outbox) prepare() {
	if o.memory == nil {
		o.memory, _ = frameMemories.Get().(*frameMemory)
		o.frames = append(o.memory.frames[:0], o.frames...)
	}
}

// release drops all frames and gives memory back.
func (o *outbox) release() {
	for i, f := range o.frames {
		o.giveBack(f, o.acked+1+uint64(i))
	}
	if o.memory != nil {
		if cap(o.frames) == len(o.memory.frames) {
			clear(o.frames)
		} else { // they had to move
			clear(o.memory.frames[:])
		}
		frameMemories.Put(o.memory)
	}
	o.frames, o.memory, o.used = nil, nil, 0
}

// clampWindow makes a usable initial window of what an assignment says.
func clampWindow(window int64) int64 {
	if window <= 0 {
		return DefaultWindow
	}
	return min(window, MaxWindow)
}

// room reports whether a chunk of n bytes fits into the window. One chunk always fits into an open window that is empty.
func (o *outbox) room(n int64) bool {
	return o.held+n <= o.window || o.held == 0 && o.window > 0
}

// admit reports whether a progress goes out now. Each phase's first one does; of the others at most mostProgress are
// unacknowledged, and the newest of those held back belongs into merged.
func (o *outbox) admit(p *runbusv1.RunnerWorkProgress) bool {
	phase := uint64(1) << (uint32(p.GetUpdate().GetPhase()) & 63)
	if o.phases&phase != 0 && o.progress >= mostProgress {
		return false
	}
	o.phases |= phase
	o.merged = nil
	return true
}

// push appends a frame that carries the number last+1.
func (o *outbox) push(f outFrame, now func() time.Time) {
	if len(o.frames) == 0 && o.last > 0 {
		o.movedAt = now()
	}
	o.last++
	o.frames = append(o.frames, f)
	o.held += f.bytes
	if f.progress {
		o.progress++
	}
}

// take is the next frame to publish, false if none is to go out now. The epoch goes to failed if the publish fails.
func (o *outbox) take() (f encoded, seq, epoch uint64, ok bool) {
	if !o.ready() {
		return encoded{}, 0, 0, false
	}
	seq = o.cursor
	o.cursor++
	return o.frames[seq-o.acked-1].encoded, seq, o.epoch, true
}

// ready reports whether take would give a frame.
func (o *outbox) ready() bool { return !o.stalled && !o.resuming && o.cursor <= o.last }

// peek is the size of the frame that take would give, in bytes; 0 for none.
func (o *outbox) peek() int {
	if !o.ready() {
		return 0
	}
	return o.frames[o.cursor-o.acked-1].size()
}

// waiting is the size of all frames that take would give, in bytes.
func (o *outbox) waiting() (bytes int) {
	if !o.ready() {
		return 0
	}
	ready := o.frames[o.cursor-o.acked-1:]
	for i := range ready {
		bytes += ready[i].size()
	}
	return bytes
}

// failed says that the link did not take frame seq and those after it. They stay, and go out again after resume. It reports whether that
// means anything: not if the stream was resumed in the meantime and will send them anyway, or is another one by now.
func (o *outbox) failed(seq, epoch uint64) bool {
	if epoch != o.epoch {
		return false
	}
	o.cursor = max(min(o.cursor, seq), o.acked+1)
	o.stalled = true
	return true
}

// resume begins again after a reconnect: what is unacknowledged may be lost.
func (o *outbox) resume(now time.Time) {
	o.epoch++
	o.stalled = false
	if o.acked < o.last {
		o.resuming = true
		o.resumeAt = now
	}
}

// probe reports whether a resume is to be published now: after a reconnect every `every` until credit comes; and every
// `after` when nothing was acknowledged for so long though frames are under way, in case the replica's own link lost them.
func (o *outbox) probe(now time.Time, every, after time.Duration) bool {
	switch {
	case o.acked == o.last || now.Before(o.resumeAt):
		return false
	case o.resuming:
		o.resumeAt = now.Add(every)
		return true
	case now.Before(o.movedAt.Add(after)) || o.cursor == o.acked+1 && !o.stalled:
		return false
	}
	o.resumeAt = now.Add(after)
	return true
}

// sent is what a resume tells: the highest number that may be there.
func (o *outbox) sent() uint64 {
	if o.resuming || o.stalled {
		return o.last
	}
	return o.cursor - 1
}

// credit takes an acknowledgement in. It reports whether the credit was one of this stream.
func (o *outbox) credit(c credit, now time.Time) bool {
	if c.settled {
		c.acknowledged, c.window = o.last, o.window
	}
	if c.acknowledged > o.last || c.settled && !o.final {
		return false // of frames that were never sent: not from a receiver of this stream
	}
	o.heardAt = now
	if n := c.acknowledged; n > o.acked {
		for i, f := range o.frames[:n-o.acked] {
			o.giveBack(f, o.acked+1+uint64(i))
			o.held -= f.bytes
			if f.progress {
				o.progress--
			}
		}
		kept := copy(o.frames, o.frames[n-o.acked:])
		clear(o.frames[kept:])
		o.frames = o.frames[:kept]
		o.acked = n
		o.movedAt = now
		o.cursor = max(o.cursor, n+1)
		if kept == 0 && o.final {
			o.release()
		}
	}
	if c.acknowledged == o.acked { // an older credit's window is no longer true
		o.window = min(max(c.window, 0), MaxWindow)
	}
	if c.resend || o.resuming || o.stalled {
		o.epoch++
		o.cursor = o.acked + 1
		o.resuming, o.stalled = false, false
	}
	return true
}
