package bus

import (
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Progress that piles up is merged, the first of each phase is not, and none leaves a gap.
func TestProgressIsMerged(t *testing.T) {
	w := newWorld(DefaultWindow)
	send := func(f Frame) {
		t.Helper()
		if err := w.sender.take(f, chunkBytes(f)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 1000 {
		send(&runbusv1.RunnerWorkProgress{Update: &runbusv1.RunFetchUpdate{Phase: runbusv1.Phase_PHASE_STREAMING, Rows: int64(i)}})
	}
	if n := len(w.sender.out.frames); n != mostProgress {
		t.Fatalf("%d progress frames are kept", n)
	}
	send(&runbusv1.RunnerWorkProgress{Update: &runbusv1.RunFetchUpdate{Phase: runbusv1.Phase_PHASE_DONE}})
	if n := len(w.sender.out.frames); n != mostProgress+1 {
		t.Fatalf("the first progress of a phase was merged: %d frames", n)
	}
	send(&runbusv1.RunnerWorkProgress{Update: &runbusv1.RunFetchUpdate{Phase: runbusv1.Phase_PHASE_DONE, Rows: 7}})
	w.sender.credit(credit{dispatch: testDispatch, session: testSession, acknowledged: 3, window: DefaultWindow}, w.now)
	last := w.sender.out.frames[len(w.sender.out.frames)-1]
	p := &runbusv1.RunnerWorkProgress{}
	if err := proto.Unmarshal(last.entry[last.body:], p); err != nil {
		t.Fatal(err)
	}
	if p.GetSeq() != mostProgress+2 || p.GetUpdate().GetRows() != 7 || w.sender.out.merged != nil {
		t.Fatalf("after credit the newest progress is frame %d, rows %d", p.GetSeq(), p.GetUpdate().GetRows())
	}
}

// A stream whose replica was silent for 30 s says so once; each credit of the stream begins the time anew, another's does not.
func TestSilenceIsCountedFromTheLastCredit(t *testing.T) {
	w := newWorld(DefaultWindow)
	orphaned := func() bool {
		w.sender.look(w.now, w.timing)
		select {
		case <-w.sender.Orphaned():
			return true
		default:
			return false
		}
	}
	w.now = w.now.Add(29 * time.Second)
	if orphaned() {
		t.Fatal("orphaned after 29 s")
	}
	w.sender.credit(credit{dispatch: testDispatch, session: testSession}, w.now)
	w.now = w.now.Add(29 * time.Second)
	if orphaned() {
		t.Fatal("orphaned 29 s after a credit")
	}
	for _, c := range []credit{
		{dispatch: testDispatch, session: "0000"},
		{dispatch: "d0", session: testSession},
		{dispatch: testDispatch, session: testSession, acknowledged: 1}, // nothing was sent
	} {
		w.sender.credit(c, w.now)
	}
	w.now = w.now.Add(time.Second)
	for range 2 { // and it stays so
		if !orphaned() {
			t.Fatal("not orphaned after 30 s")
		}
	}
	if n := w.sender.all.ignored.Load(); n != 3 {
		t.Fatalf("%d credits ignored", n)
	}
}

// A publish that fails only after the stream was resumed must not stop it again.
func TestLateFailureDoesNotStall(t *testing.T) {
	w := newWorld(DefaultWindow)
	if err := w.sender.take(&runbusv1.RunnerWorkAccepted{}, 0); err != nil {
		t.Fatal(err)
	}
	_, seq, epoch, _ := w.sender.out.take()
	w.sender.out.resume(w.now)
	w.sender.credit(credit{dispatch: testDispatch, session: testSession}, w.now)
	w.sender.out.failed(seq, epoch)
	if _, again, _, ok := w.sender.out.take(); !ok || again != seq {
		t.Fatalf("frame %d is not sent again", seq)
	}
	// A failure of now does stop it, until the next resume is answered.
	w.sender.out.failed(seq, w.sender.out.epoch)
	if _, _, _, ok := w.sender.out.take(); ok {
		t.Fatal("it goes on without a link")
	}
}
