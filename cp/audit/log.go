// Package audit records every change, enrolment, credential read, dispatch and refusal (SPEC R8) in the audit stream: by
// group commit, many events to a message, each message chained to the one before by its SHA-256. Several replicas share
// one chain. What must be durable before it is acknowledged uses Record, the rest Note.
package audit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const (
	// recordWait bounds Record where its context doesn't.
	recordWait = 10 * time.Second
	// flushWait is how long Run goes on after its context's end, to write what is pending.
	flushWait = 5 * time.Second
	// Bounds of what waits to be written. A note over them is dropped and counted, a Record refused.
	maxNotes     = 16384
	maxNoteBytes = 16 << 20
	maxRecords   = 16384

	// Who writes notes at a high rate is held back between these numbers of notes that wait.
	crowdedAt = maxNotes * 3 / 4
	roomyAt   = maxNotes / 2

	// noteWait is how long notes wait for one another when nobody waits for any of them: each write is one for the disk.
	noteWait = 50 * time.Millisecond
	// batchWorth is how many notes are worth a message at once. Each message costs a write for the disk, some dozens of turns of others, and one
	// of Go's processors for as long as the disk takes (measured, packed, at 64 in flight: with 256, 512 and 1,000 to a message 77,000, 82,000
	// and 88,000 dispatches/s; with 2,000 no more, and the slowest hundredth of the dispatches at 16 in flight wait longer).
	batchWorth = maxBatchEvents

	retryFirst = 50 * time.Millisecond
	retryMost  = 2 * time.Second
)

// ActionOverflow is the action of the event that tells how many notes were dropped.
const ActionOverflow = "audit.overflow"

// Log is the audit log of one replica. It is safe for concurrent use. Nothing is written before Run runs.
type Log struct {
	store  *jetstream.Store
	writer string
	log    *slog.Logger
	wake   chan struct{}

	crowded atomic.Bool // crowd is not nil

	body    []byte        // the last batch of several parts, for its memory; belongs to Run
	packed  []byte        // …the last one that was packed, likewise
	flushIn time.Duration // flushWait

	closing sync.Once
	last    []func() // of AtClose; guarded by mu

	mu        sync.Mutex
	clock     clock
	ids       counter
	who       who
	openings  openings // not yet in pending
	pending   []part
	spare     [][]byte // memory of notes that were written
	notes     int      // of pending
	noteBytes int
	noteSince time.Time     // the oldest note is about as old
	crowd     chan struct{} // closed when there is room again; nil while there is
	records   int
	dropped   uint64 // notes, not yet told by an event
	closed    bool
	head      chain     // the end of the stream as last seen
	headKnown bool      // false: somebody else has written since, or may have
	failing   error     // of the last attempt, while events wait; nil when it succeeded
	failedAt  time.Time // the first attempt that failed since one succeeded
}

// part is what waits to be written: notes, encoded one behind the other with commas between them, or one recorded event.
type part struct {
	notes  []byte // behind batchOverhead bytes, in which the head of a batch has room
	events int    // in notes
	record *entry
}

// text is its events.
func (p part) text() []byte {
	if p.record != nil {
		return p.record.body
	}
	return p.notes[batchOverhead:]
}

// size is its bytes in a batch.
func (p part) size() int { return len(p.text()) + 1 }

// entry is one recorded event on its way.
type entry struct {
	body      []byte
	done      chan error
	abandoned bool // its Record has given up; guarded by Log.mu
}

// New opens the log for one writer: the name of the replica, at most 64 bytes. It reads the end of the stream, so it
// fails when JetStream is not there, and with an *BrokenError when the last batch is damaged.
func New(ctx context.Context, store *jetstream.Store, writer string, log *slog.Logger) (*Log, error) {
	if writer == "" || len(writer) > maxWriter {
		return nil, schemas.Errorf(schemas.CodeInvalid, "the audit log's writer needs a name of 1-%d bytes", maxWriter)
	}
	if log == nil {
		log = slog.Default()
	}
	l := &Log{store: store, writer: writer, log: log, wake: make(chan struct{}, 1), flushIn: flushWait}
	if err := l.reload(ctx); err != nil {
		return nil, fmt.Errorf("open the audit log: %w", err)
	}
	return l, nil
}

// Record returns nil when e is durable. Otherwise it is an error of CodeUnavailable, by the end of ctx or after 10 s, and e
// may be recorded or not: don't do what e says. An event without actor or action is CodeInvalid, one over 128 KiB
// CodeLimit. It fills e's id and time where they are empty.
func (l *Log) Record(ctx context.Context, e *runbusv1.AuditEvent) error {
	body, err := encodeEvent(e, time.Now())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, recordWait)
	defer cancel()
	if ctx.Err() != nil {
		return unavailable(context.Cause(ctx))
	}
	n := &entry{body: body, done: make(chan error, 1)}
	l.mu.Lock()
	if l.closed || l.records >= maxRecords {
		l.mu.Unlock()
		return unavailable(errors.New("the audit log is closed, or too much waits for it"))
	}
	l.settleBefore(time.Now(), 0) // what has begun stands before what it does
	l.records++
	l.pending = append(l.pending, part{record: n})
	l.mu.Unlock()
	l.signal()
	select {
	case err := <-n.done:
		return err
	case <-ctx.Done():
	}
	l.mu.Lock()
	n.abandoned = true
	l.mu.Unlock()
	select {
	case err := <-n.done: // at the last moment
		return err
	default:
		return unavailable(context.Cause(ctx))
	}
}

func (l *Log) signal() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// AtClose has f called once when the end of Run's context has come, before the log refuses anything: f notes what would otherwise be noted
// later. f must not wait for what is recorded.
func (l *Log) AtClose(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last = append(l.last, f)
}

// Run writes what is recorded until ctx ends; then it calls what AtClose was given, refuses what is new, writes what is pending for at most
// 5 s, and returns nil. It must be called once.
func (l *Log) Run(ctx context.Context) error {
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	defer context.AfterFunc(ctx, func() {
		l.sayLast()
		l.mu.Lock()
		l.close()
		l.mu.Unlock()
		timer := time.NewTimer(l.flushIn)
		defer timer.Stop()
		select {
		case <-timer.C:
			stop()
		case <-work.Done():
		}
	})()
	for l.await(ctx) {
		if batch := l.take(); len(batch) > 0 {
			l.commit(work, batch)
		}
	}
	return nil
}

// await returns true when something is to be written now, and false when ctx has ended and nothing is left.
func (l *Log) await(ctx context.Context) bool {
	timer := time.NewTimer(noteWait)
	defer timer.Stop()
	for {
		over := ctx.Err() != nil
		if over {
			l.sayLast()
		}
		l.mu.Lock()
		if l.closed || over {
			l.close()
		}
		at := time.Now()
		closed, empty := l.closed, len(l.pending) == 0 && l.openings.count == 0
		waited := time.Duration(0)
		if l.notes > 0 {
			waited = at.Sub(l.noteSince)
		}
		if o := l.openings.first; o != nil {
			waited = max(waited, o.waited(at))
		}
		now := l.records > 0 || l.notes >= batchWorth || waited >= noteWait || empty && l.dropped > 0
		l.mu.Unlock()
		switch {
		case now || closed && !empty:
			return true
		case closed:
			return false
		}
		var due <-chan time.Time
		if !empty {
			timer.Reset(noteWait - waited)
			due = timer.C
		}
		select {
		case <-l.wake:
		case <-due:
		case <-ctx.Done():
		}
	}
}

// sayLast calls what AtClose was given, and returns when it was called. The lock is not held.
func (l *Log) sayLast() {
	l.closing.Do(func() {
		l.mu.Lock()
		last := l.last
		l.mu.Unlock()
		for _, f := range last {
			f()
		}
	})
}

// close takes no more notes, and lets nobody wait for room. The lock is held.
func (l *Log) close() {
	if !l.closed {
		l.settleBefore(time.Now(), 0)
		l.closed = true
	}
	l.release()
}

// take is the next batch: everything pending, within the bounds of one message.
func (l *Log) take() []part {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.settleBefore(time.Now(), noteWait)
	var batch []part
	events, size := 0, batchOverhead
	if l.dropped > 0 {
		n := strconv.FormatUint(l.dropped, 10)
		body, err := encodeEvent(Event(ActorPlatform, ActionOverflow, "audit", "ok", "dropped", n, "writer", l.writer), time.Now())
		if err != nil {
			l.log.Error("dropped audit events can't be told", "dropped", n, "error", err)
		} else {
			l.dropped = 0
			batch = append(batch, part{notes: append(make([]byte, batchOverhead, batchOverhead+len(body)), body...), events: 1})
			events, size = 1, size+len(body)+1
		}
	}
	taken := 0
	for _, p := range l.pending {
		if p.record == nil || !p.record.abandoned {
			n := max(p.events, 1)
			if taken > 0 && events+n > maxBatchEvents || size+p.size() > maxBatchBytes {
				break
			}
			batch = append(batch, p)
			events, size = events+n, size+p.size()
		}
		taken++
		if p.record != nil {
			l.records--
		} else {
			l.notes -= p.events
			l.noteBytes -= len(p.text()) - p.events + 1
		}
	}
	if l.notes <= roomyAt {
		l.release()
	}
	kept := copy(l.pending, l.pending[taken:])
	clear(l.pending[kept:])
	l.pending = l.pending[:kept]
	l.noteSince = time.Now()
	return batch
}

func count(batch []part) (events int) {
	for _, p := range batch {
		events += max(p.events, 1)
	}
	return events
}

// commit writes one batch and tells those who wait for it. It tries until it is written, or ctx ends, or nobody wants it
// any more. A batch whose outcome is unknown is only sent again as it was, behind the same end, where it can stand once.
func (l *Log) commit(ctx context.Context, batch []part) {
	wait := retryFirst
	for {
		if batch = l.wanted(batch); len(batch) == 0 {
			l.setFailing(nil) // nothing waits: the next attempt tells
			return
		}
		err := l.attempt(ctx, batch)
		if err == nil {
			l.finish(batch, nil)
			return
		}
		if errors.Is(err, jetstream.ErrLost) {
			continue // another replica was first: chain to its batch
		}
		l.setFailing(err)
		l.log.Warn("audit events wait", "events", count(batch), "error", err)
		select {
		case <-ctx.Done():
			l.log.Error("audit events were not recorded", "events", count(batch), "error", err)
			l.finish(batch, unavailable(err))
			return
		case <-time.After(wait):
		}
		wait = min(2*wait, retryMost)
	}
}

// attempt appends the batch behind the end of the stream. It returns only when it is known whether it was appended, or
// when ctx ends.
func (l *Log) attempt(ctx context.Context, batch []part) error {
	head, known := l.end()
	if !known {
		if err := l.reload(ctx); err != nil {
			return err
		}
		head, _ = l.end()
	}
	text, err := l.assemble(head, batch)
	if err != nil {
		return err
	}
	body, encoding := pack(l.packed, text)
	if encoding != "" {
		l.packed = body
	}
	for wait := retryFirst; ; wait = min(2*wait, retryMost) {
		seq, err := l.store.AppendAudit(ctx, body, encoding, head.number)
		if err == nil {
			l.setEnd(after(seq, body), true)
			l.setFailing(nil)
			return nil
		}
		if !errors.Is(err, jetstream.ErrUnknown) {
			if errors.Is(err, jetstream.ErrLost) {
				l.setEnd(head, false)
			}
			return err
		}
		l.setFailing(err)
		l.log.Warn("whether an audit batch was written is not known yet", "number", head.number+1, "error", err)
		select {
		case <-ctx.Done():
			l.setEnd(head, false)
			return err
		case <-time.After(wait):
		}
	}
}

// assemble is the text of the batch behind head, until it is called again, or the memory of the batch is used again.
func (l *Log) assemble(head chain, batch []part) ([]byte, error) {
	if len(batch) == 1 && batch[0].record == nil { // of most dispatches
		if body, ok, err := head.around(batch[0].notes, l.writer); ok || err != nil {
			return body, err
		}
	}
	events := make([][]byte, len(batch))
	for i, p := range batch {
		events[i] = p.text()
	}
	body, err := head.append(l.body[:0], l.writer, events)
	if err == nil {
		l.body = body
	}
	return body, err
}

// wanted leaves out the events whose Record has given up.
func (l *Log) wanted(batch []part) []part {
	l.mu.Lock()
	defer l.mu.Unlock()
	kept := batch[:0]
	for _, p := range batch {
		if p.record == nil || !p.record.abandoned {
			kept = append(kept, p)
		}
	}
	return kept
}

// reload reads the end of the stream. An end before the one known is a history that was cut off.
func (l *Log) reload(ctx context.Context) error {
	seq, body, err := l.store.LastAudit(ctx)
	if errors.Is(err, jetstream.ErrNotFound) {
		return &BrokenError{Number: seq, Why: "it is the last one and was removed"}
	}
	if err != nil {
		return err
	}
	end := chain{}
	if seq > 0 {
		batch, err := decodeBatch(body)
		if err != nil {
			return &BrokenError{Number: seq, Why: "it does not decode: " + err.Error()}
		}
		if batch.GetNumber() != seq {
			return &BrokenError{Number: seq, Why: fmt.Sprintf("the batch in its place has number %d", batch.GetNumber())}
		}
		end = after(seq, body)
	}
	known, _ := l.end()
	if end.number < known.number || end.number == known.number && end.sum != known.sum {
		return &BrokenError{Number: known.number, Why: "it is not what was written there"}
	}
	l.setEnd(end, true)
	return nil
}

func (l *Log) end() (chain, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.head, l.headKnown
}

func (l *Log) setEnd(c chain, known bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.head, l.headKnown = c, known
}

func (l *Log) setFailing(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil && l.failing == nil {
		l.failedAt = time.Now()
		l.release()
	}
	l.failing = err
}

// Failing tells for how long events have waited that can't be written, and why. Zero and nil: none does.
func (l *Log) Failing() (time.Duration, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failing == nil {
		return 0, nil
	}
	return time.Since(l.failedAt), l.failing
}

func unavailable(cause error) error {
	return schemas.Wrap(schemas.CodeUnavailable, cause, "the audit log can't be written now, so nothing was done").
		WithHint("try again when /readyz is ready")
}
