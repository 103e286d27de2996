package bus

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/encoding/protowire"
	"pgregory.net/rapid"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const (
	testSession  = "5e551011"
	testDispatch = "d15baac4"
)

// world is both halves of one stream, a clock, and the two directions of a network that may lose, repeat and reorder.
type world struct {
	now      time.Time
	timing   timing
	sender   *Sender
	in       inbox
	up       []*nats.Msg // frames and resumes on their way to the replica
	down     []credit    // on their way to the runner
	sent     int         // chunks sent
	sum      [32]byte    // over the chunks sent
	got      int
	gotSum   [32]byte
	handed   []Frame // given out, not consumed
	lastSeq  uint64
	finished bool // the result was given out
}

func newWorld(window int64) *world {
	w := &world{now: time.Unix(1000, 0), timing: newTiming(nil)}
	ref := schemas.RunnerRef{Tenant: "acme", Runner: "edge"}
	all := &Senders{ref: ref, now: func() time.Time { return w.now }, wake: make(chan struct{}, 1)}
	w.sender = &Sender{stream: stream{all: all, dispatch: testDispatch, session: testSession, replica: "c"}}
	w.sender.out.init(window, w.now)
	w.in.init(window, window)
	return w
}

func (w *world) send(t *rapid.T, f Frame) {
	if err := w.sender.take(f, chunkBytes(f)); err != nil {
		t.Fatalf("send: %v", err)
	}
}

func (w *world) sendChunk(t *rapid.T, size int) {
	if !w.sender.out.room(int64(size)) {
		return
	}
	b := make([]byte, size)
	binary.BigEndian.PutUint64(b, uint64(w.sent)) // sizes are at least 8
	w.sent++
	w.sum = sha256.Sum256(append(w.sum[:], b...))
	w.send(t, &runbusv1.RunnerWorkChunk{ArrowIpc: b})
}

// publish moves what the sender would write onto the network.
func (w *world) publish() {
	w.sender.settle()
	for b := (batch{replica: w.sender.replica}); ; {
		large, _, _, full := w.sender.gather(&b, w.sender.bundles)
		if len(b.parts) > 0 {
			msg := b.message(w.sender.all.ref)
			msg.Data = slices.Clone(msg.Data)
			w.up = append(w.up, msg)
			b.clear()
		}
		if large.size() > 0 {
			w.up = append(w.up, w.sender.message(large))
		} else if !full {
			break
		}
	}
	if w.sender.out.probe(w.now, w.timing.resume, w.timing.probe) {
		msg, err := NewMsg(w.sender.ctl(), &runbusv1.RunnerWorkResume{Sent: w.sender.out.sent(), Acknowledged: w.sender.out.acked})
		if err != nil {
			panic(err)
		}
		w.up = append(w.up, msg)
	}
}

func (w *world) arrive(t *rapid.T, msg *nats.Msg) {
	if TypeOf(msg) == "RunnerWorkResume" {
		m := &runbusv1.RunnerWorkResume{}
		if err := Decode(msg, m); err != nil {
			t.Fatal(err)
		}
		w.in.resumed(m.GetSent())
		return
	}
	subject, err := schemas.Parse(msg.Subject)
	if err != nil {
		t.Fatal(err)
	}
	frames, err := decodeFrames(msg, subject.Kind, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range frames {
		w.in.offerSized(f, w.now, w.timing)
	}
}

// consume takes frames out as the caller of Next does, and checks what comes.
func (w *world) consume(t *rapid.T) {
	var few [5]Frame
	frames, _ := w.in.next(few[:0])
	for _, f := range frames {
		if f.GetSeq() != w.lastSeq+1 {
			t.Fatalf("frame %d came after %d", f.GetSeq(), w.lastSeq)
		}
		if w.finished {
			t.Fatalf("frame %d came after the result", f.GetSeq())
		}
		w.handed = append(w.handed, f)
		switch f := f.(type) {
		case *runbusv1.RunnerWorkChunk:
			w.got++
			w.gotSum = sha256.Sum256(append(w.gotSum[:], f.GetArrowIpc()...))
		case *runbusv1.RunnerWorkResult:
			w.finished = true
		}
	}
	if n := len(frames); n > 0 {
		w.lastSeq = frames[n-1].GetSeq() // all of one have its number
	}
}

func (w *world) done() {
	if len(w.handed) > 0 {
		w.in.done(w.handed[0].GetSeq())
		w.handed = w.handed[1:]
	}
}

// credit moves the credit that is due onto the network.
func (w *world) credit() {
	w.in.look(w.now, w.timing)
	if c, ok := w.in.credit(w.now); ok {
		c.dispatch, c.session = testDispatch, testSession
		w.down = append(w.down, c)
	}
}

func (w *world) check(t *rapid.T) {
	out, in := &w.sender.out, &w.in
	if out.held > MaxWindow+ChunkBytes {
		t.Fatalf("the sender holds %d bytes", out.held)
	}
	var held int64
	progress := 0
	for _, f := range out.frames {
		held += f.bytes
		if f.progress {
			progress++
		}
	}
	if held != out.held || progress != out.progress || len(out.frames) != int(out.last-out.acked) {
		t.Fatalf("the sender's sums are wrong: %d bytes of %d, %d progress of %d, %d frames", held, out.held, progress, out.progress, len(out.frames))
	}
	if progress > mostProgress+8 {
		t.Fatalf("%d progress frames are kept", progress)
	}
	if out.cursor <= out.acked || out.cursor > out.last+1 {
		t.Fatalf("cursor %d outside of %d…%d", out.cursor, out.acked+1, out.last+1)
	}
	if in.held > mostHeldBytes || len(in.queue) > mostHeldFrames || int(in.last-in.consumed) != len(in.queue) {
		t.Fatalf("the receiver holds %d bytes, %d frames for %d…%d", in.held, len(in.queue), in.consumed+1, in.last)
	}
	if out.acked > in.last {
		t.Fatalf("acknowledged %d, received %d", out.acked, in.last)
	}
}

// remove takes one element out of a queue; not always the first.
func remove[T any](t *rapid.T, q *[]T, reorder bool) (one T) {
	i := 0
	if reorder {
		i = rapid.IntRange(0, len(*q)-1).Draw(t, "which")
	}
	one = (*q)[i]
	*q = append((*q)[:i:i], (*q)[i+1:]...)
	return one
}

// Whatever the network loses, repeats and reorders, the caller sees every byte once and in order, both sides hold bounded
// memory, and when the network is good again the stream ends with all acknowledged.
func TestStreamSurvivesAnyNetwork(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(rapid.SampledFrom([]int64{MinWindow, DefaultWindow, MaxWindow}).Draw(t, "window"))
		reorder := rapid.Bool().Draw(t, "reorder")
		w.sender.bundles = rapid.Bool().Draw(t, "bundles")
		w.sender.whole = rapid.Bool().Draw(t, "whole")
		w.send(t, &runbusv1.RunnerWorkAccepted{})
		size := rapid.SampledFrom([]int{8, 1000, 200 << 10, 300 << 10, ChunkBytes})
		t.Repeat(map[string]func(*rapid.T){
			"":      w.check,
			"chunk": func(t *rapid.T) { w.sendChunk(t, size.Draw(t, "size")) },
			"progress": func(t *rapid.T) {
				p := &runbusv1.RunnerWorkProgress{Update: &runbusv1.RunFetchUpdate{Phase: runbusv1.Phase(rapid.IntRange(0, 7).Draw(t, "phase"))}}
				if err := w.sender.take(p, 0); err != nil {
					t.Fatal(err)
				}
			},
			"publish": func(*rapid.T) { w.publish() },
			"refused": func(*rapid.T) { // the link does not take a frame
				if _, seq, epoch, ok := w.sender.out.take(); ok {
					w.sender.out.failed(seq, epoch)
				}
			},
			"arrive": func(t *rapid.T) {
				if len(w.up) > 0 {
					w.arrive(t, remove(t, &w.up, reorder))
				}
			},
			"lose": func(t *rapid.T) {
				if len(w.up) > 0 {
					remove(t, &w.up, true)
				}
			},
			"repeat": func(t *rapid.T) {
				if len(w.up) > 0 {
					w.up = append(w.up, w.up[rapid.IntRange(0, len(w.up)-1).Draw(t, "which")])
				}
			},
			"consume": w.consume,
			"done":    func(*rapid.T) { w.done() },
			"credit":  func(*rapid.T) { w.credit() },
			"acknowledge": func(t *rapid.T) {
				if len(w.down) > 0 {
					w.sender.credit(remove(t, &w.down, reorder), w.now)
				}
			},
			"lose credit": func(t *rapid.T) {
				if len(w.down) > 0 {
					remove(t, &w.down, true)
				}
			},
			"repeat credit": func(t *rapid.T) {
				if len(w.down) > 0 {
					w.down = append(w.down, w.down[rapid.IntRange(0, len(w.down)-1).Draw(t, "which")])
				}
			},
			"cut": func(*rapid.T) {
				w.up, w.down = nil, nil
				w.sender.out.resume(w.now)
			},
			"resize": func(t *rapid.T) {
				w.in.resize(rapid.SampledFrom([]int64{256 << 10, MinWindow, MaxWindow}).Draw(t, "window"))
			},
			"time": func(t *rapid.T) {
				w.now = w.now.Add(time.Duration(rapid.IntRange(1, 3000).Draw(t, "ms")) * time.Millisecond)
			},
		})
		w.finish(t)
	})
}

// finish sends the result over a network that loses nothing any more and waits, in the clock of the test, for the end.
func (w *world) finish(t *rapid.T) {
	w.last(t)
	for round := 0; w.sender.out.acked < w.sender.out.last || !w.finished; round++ {
		if round > 200 {
			t.Fatalf("no end: runner has %d of %d acknowledged, replica %d, seen %d", w.sender.out.acked, w.sender.out.last, w.in.last, w.in.highest)
		}
		w.publish()
		for len(w.up) > 0 {
			w.arrive(t, remove(t, &w.up, false))
		}
		w.consume(t)
		for w.in.handed < w.in.last {
			w.consume(t)
		}
		for len(w.handed) > 0 {
			w.done()
		}
		w.credit()
		for len(w.down) > 0 {
			w.sender.credit(remove(t, &w.down, false), w.now)
		}
		w.check(t)
		w.now = w.now.Add(500 * time.Millisecond)
	}
	if w.got != w.sent || !bytes.Equal(w.gotSum[:], w.sum[:]) {
		t.Fatalf("%d chunks arrived of %d, or not as they were sent", w.got, w.sent)
	}
}

// last sends the last chunk and the result, as one frame with all that came before if none of that has left.
func (w *world) last(t *rapid.T) {
	b := binary.BigEndian.AppendUint64(nil, uint64(w.sent))
	w.sent++
	w.sum = sha256.Sum256(append(w.sum[:], b...))
	whole := w.sender.draft != nil
	result := &runbusv1.RunnerWorkResult{Started: true, Outcome: &runbusv1.RunnerWorkResult_Response{Response: &runbusv1.RunFetchResponse{Rows: 1, Bytes: 8}}}
	if err := w.sender.finish(&runbusv1.RunnerWorkChunk{ArrowIpc: b, Rows: 1, Bytes: 8}, result); err != nil {
		t.Fatalf("finish: %v", err)
	}
	if whole != (w.sender.out.last == 1) {
		t.Fatalf("%d frames of a stream that could be one: %t", w.sender.out.last, whole)
	}
}

// On a good network no chunk ever waits for a timer: the clock stands still and everything passes, whatever the sizes.
func TestStreamNeverWaitsForTime(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(rapid.SampledFrom([]int64{128 << 10, MinWindow, DefaultWindow, MaxWindow}).Draw(t, "window"))
		batch := rapid.IntRange(1, 8).Draw(t, "batch")
		w.sender.bundles = rapid.Bool().Draw(t, "bundles")
		w.send(t, &runbusv1.RunnerWorkAccepted{})
		for i, size := range rapid.SliceOfN(rapid.IntRange(8, ChunkBytes), 1, 60).Draw(t, "sizes") {
			for tries := 0; !w.sender.out.room(int64(size)); tries++ {
				if tries > 100 {
					t.Fatalf("chunk %d of %d bytes waits with %d bytes under way in a window of %d", i, size, w.sender.out.held, w.sender.out.window)
				}
				w.round(t, batch)
			}
			w.sendChunk(t, size)
			w.publish()
		}
		w.send(t, &runbusv1.RunnerWorkResult{})
		for tries := 0; w.sender.out.acked < w.sender.out.last; tries++ {
			if tries > 1000 {
				t.Fatal("the result is not acknowledged")
			}
			w.round(t, batch)
		}
		if w.got != w.sent || w.gotSum != w.sum {
			t.Fatal("not what was sent")
		}
	})
}

// round delivers everything, consumes up to batch frames and brings the credit back.
func (w *world) round(t *rapid.T, batch int) {
	w.publish()
	for len(w.up) > 0 {
		w.arrive(t, remove(t, &w.up, false))
	}
	for range batch {
		w.consume(t)
		w.done()
	}
	w.credit()
	for len(w.down) > 0 {
		w.sender.credit(remove(t, &w.down, false), w.now)
	}
	w.check(t)
}

// A runner that ignores the window can't make a replica hold more than its bound.
func TestFloodIsBounded(t *testing.T) {
	w := newWorld(MinWindow)
	full := make([]byte, ChunkBytes)
	var overruns int
	for seq := uint64(1); seq <= 100; seq++ {
		if w.in.offer(&runbusv1.RunnerWorkChunk{Seq: seq, ArrowIpc: full}, w.now, w.timing) != taken {
			overruns++
		}
	}
	if held := w.in.got - w.in.used; held > mostHeldBytes || overruns != 100-mostHeldBytes/ChunkBytes {
		t.Fatalf("%d bytes held, %d frames refused", held, overruns)
	}
	w = newWorld(MinWindow)
	for seq := uint64(1); seq <= 2*mostHeldFrames; seq++ {
		w.in.offer(&runbusv1.RunnerWorkProgress{Seq: seq}, w.now, w.timing)
	}
	if len(w.in.queue) != mostHeldFrames {
		t.Fatalf("%d frames held", len(w.in.queue))
	}

	// What the window doesn't count is bounded all the same: text, and fields that this version doesn't know.
	text := strings.Repeat("x", 1000<<10)
	unknown := protowire.AppendString(protowire.AppendTag(nil, 999, protowire.BytesType), text)
	for name, frame := range map[string]func(seq uint64) Frame{
		"progress": func(seq uint64) Frame {
			return &runbusv1.RunnerWorkProgress{Seq: seq, Update: &runbusv1.RunFetchUpdate{Message: text}}
		},
		"accepted": func(seq uint64) Frame {
			f := &runbusv1.RunnerWorkAccepted{Seq: seq}
			f.ProtoReflect().SetUnknown(unknown)
			return f
		},
		"chunk": func(seq uint64) Frame {
			f := &runbusv1.RunnerWorkChunk{Seq: seq}
			f.ProtoReflect().SetUnknown(unknown)
			return f
		},
	} {
		w = newWorld(MinWindow)
		for seq := uint64(1); seq <= 100; seq++ {
			w.in.offer(frame(seq), w.now, w.timing)
		}
		if n := len(w.in.queue); n == 0 || n > mostHeldBytes/len(text) {
			t.Errorf("%s: %d frames of 1 MB held", name, n)
		}
		for frames, ok := w.in.next(nil); ok; frames, ok = w.in.next(frames) {
			w.in.done(frames[len(frames)-1].GetSeq())
		}
		if w.in.held != 0 {
			t.Errorf("%s: all consumed, and %d bytes held", name, w.in.held)
		}
	}
}
