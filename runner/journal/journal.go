package journal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"
)

// DefaultMaxFile is the size at which the next file is begun, in bytes.
const DefaultMaxFile = 64 << 20

// While nobody waits for a sync the next one comes after a pause, four times as long as the last one took: each holds up the lines
// that are written meanwhile.
const (
	leastPause = 5 * time.Millisecond
	mostPause  = 200 * time.Millisecond
)

// Journal appends to the journal of one folder. Several processes may: each takes the folder's lock for the moment in which it writes
// the lines that wait. Safe for concurrent use. Make it with Open.
type Journal struct {
	dir     string
	maxFile int64
	now     func() time.Time
	lock    *os.File

	mu       sync.Mutex
	queue    []*entry // to write, all of it by the one that leads
	spare    []*entry // memory for queue
	leading  bool     // somebody writes, or was told to
	unsynced []*entry // written, and waiting for the disk
	closed   bool
	idle     chan struct{} // closed when closed, and nobody leads

	io     sync.Mutex // of what follows; never taken before mu
	tip    tip
	synced Anchor // the last line that is known to be on the disk
	text   []byte // memory for lines

	written chan struct{} // room for one: there are lines to bring to the disk
	urgent  chan struct{} // room for one: and somebody waits for it
	quit    chan struct{}
	done    chan struct{}
	stop    sync.Once
}

// entry is one record on its way to the disk.
type entry struct {
	record  Record
	durable bool
	written bool
	err     error
	turn    chan turn // room for one
}

// turn is what an entry waits for: to lead, or how it ended.
type turn struct {
	lead bool
	err  error
}

var entries = sync.Pool{New: func() any { return &entry{turn: make(chan turn, 1)} }}

// Open makes the folder (mode 0700) if it is missing and checks that it can be written. maxFile of zero means DefaultMaxFile.
func Open(dir string, maxFile int64) (*Journal, error) {
	if maxFile <= 0 {
		maxFile = DefaultMaxFile
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	j := &Journal{
		dir: dir, maxFile: maxFile, now: time.Now, lock: lock, idle: make(chan struct{}),
		written: make(chan struct{}, 1), urgent: make(chan struct{}, 1), quit: make(chan struct{}), done: make(chan struct{}),
	}
	if err := j.exclusively(j.attach); err != nil {
		_ = lock.Close()
		return nil, err
	}
	go j.bring()
	return j, nil
}

// Close finishes the appends that run, brings every line to the disk, and lets go of the folder. A second Close does nothing.
func (j *Journal) Close() (err error) {
	j.stop.Do(func() {
		j.mu.Lock()
		j.closed = true
		if !j.leading {
			close(j.idle)
		}
		j.mu.Unlock()
		<-j.idle
		close(j.quit)
		<-j.done
		j.io.Lock()
		defer j.io.Unlock()
		err = errors.Join(j.detach(), j.lock.Close())
	})
	return err
}

// Head is the last line as this process knows it; number 0 and 64 zeros for an empty journal.
func (j *Journal) Head() Anchor {
	j.io.Lock()
	defer j.io.Unlock()
	return j.tip.last
}

// ErrClosed is what Append returns after Close.
var ErrClosed = errors.New("the journal is closed")

// Append writes r, with number, chain and time filled in, and returns when the line is in the file; with durable, when it is on the disk.
// Without, it gets there right after, in some milliseconds unless the disk is slow. Lines of several callers are written together, and go to the disk together. On an
// error it must be assumed that nothing was recorded; the next Append tries anew. A ctx that has ended records nothing; one that
// ends later is not looked at.
func (j *Journal) Append(ctx context.Context, r Record, durable bool) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	e, ok := entries.Get().(*entry)
	if !ok {
		e = &entry{turn: make(chan turn, 1)}
	}
	e.record, e.durable = r, durable
	j.mu.Lock()
	if j.closed {
		j.mu.Unlock()
		return ErrClosed
	}
	j.queue = append(j.queue, e)
	lead := !j.leading
	j.leading = true
	j.mu.Unlock()
	if lead {
		runtime.Gosched() // one turn for those who are about to append: their lines go into the same write
		j.lead()
	}
	got := <-e.turn
	if got.lead {
		j.lead()
		got = <-e.turn
	}
	*e = entry{turn: e.turn}
	entries.Put(e)
	if got.err != nil {
		return fmt.Errorf("journal: %w", got.err)
	}
	return nil
}

// lead writes what waits, then lets the first of those who came meanwhile do the same.
func (j *Journal) lead() {
	j.mu.Lock()
	batch := j.queue
	j.queue, j.spare = j.spare, nil
	j.mu.Unlock()
	j.commit(batch)
	clear(batch)

	j.mu.Lock()
	defer j.mu.Unlock()
	j.spare = batch[:0]
	if len(j.queue) > 0 {
		j.queue[0].turn <- turn{lead: true}
		return
	}
	j.leading = false
	if j.closed {
		close(j.idle)
	}
}

// commit writes a batch and answers its entries, but those that wait for the disk.
func (j *Journal) commit(batch []*entry) {
	err := j.exclusively(func() error {
		if err := j.attach(); err != nil {
			return err
		}
		return j.write(batch)
	})
	var wrote, waits bool
	for _, e := range batch {
		switch {
		case !e.written && e.err == nil:
			e.turn <- turn{err: err}
		case !e.written:
			e.turn <- turn{err: e.err}
		case e.durable:
			waits = true
			j.mu.Lock()
			j.unsynced = append(j.unsynced, e)
			j.mu.Unlock()
		default:
			wrote = true
			e.turn <- turn{}
		}
	}
	if waits {
		poke(j.urgent)
	} else if wrote {
		poke(j.written)
	}
}

// poke sends to a channel that has room for one, unless it is full.
func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// bring brings what was written to the disk: at once if somebody waits for it, else together with what follows soon.
func (j *Journal) bring() {
	defer close(j.done)
	pause := time.NewTimer(mostPause)
	defer pause.Stop()
	for ends := false; !ends; {
		select {
		case <-j.written:
		case <-j.urgent:
		case <-j.quit:
			ends = true
		}
		j.mu.Lock()
		waiting := j.unsynced
		j.unsynced = nil
		j.mu.Unlock()
		began := time.Now()
		err := j.flush()
		pause.Reset(min(max(4*time.Since(began), leastPause), mostPause))
		for _, e := range waiting {
			e.turn <- turn{err: err}
		}
		select {
		case <-pause.C:
		case <-j.urgent:
			poke(j.urgent)
		case <-j.quit:
		}
	}
}

// flush brings the lines so far to the disk, then the head, which thus never knows of a line that may be lost. The files before the
// last one are there since it was begun.
func (j *Journal) flush() error {
	j.io.Lock()
	name, last, synced := j.tip.name, j.tip.last, j.synced
	j.io.Unlock()
	if last == synced || name == "" {
		return nil
	}
	if err := syncFile(filepath.Join(j.dir, name)); err != nil {
		return err
	}
	return j.exclusively(func() error {
		head, there, err := readHead(j.dir)
		if err != nil {
			return err
		}
		if !there {
			return errNoHead
		}
		if head.Seq < last.Seq { // else another process was faster
			err = writeHead(j.dir, last)
		}
		if err == nil {
			j.synced = last
		}
		return err
	})
}
