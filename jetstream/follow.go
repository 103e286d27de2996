package jetstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/schemas"
)

// follower keeps somebody informed about one bucket: a scan of the leader, then a watch from there, until something about
// the watch is off, and then the same again. It runs in one goroutine, which makes all the calls.
type follower struct {
	s      *Store
	bucket Bucket
	log    *slog.Logger

	load    func(found scanned, anew bool) // the whole bucket; anew: of another stream than before
	apply   func(entry)
	knows   func(key string) bool
	confirm func(time.Time)

	created time.Time // of the stream that was loaded last
	cursor  uint64    // everything up to here was loaded or applied
	asked   time.Time // when the leader said that claimed was its last sequence
	claimed uint64
}

const (
	watchHeartbeat = 2 * time.Second    // idle heartbeats of the server
	watchSilence   = 3 * watchHeartbeat // then the watch is dead
	watchBuffer    = 4096               // messages; what doesn't fit is noticed as a gap
	followRetry    = 250 * time.Millisecond
	followRetryMax = 2 * time.Second
)

// flowControl and the stream's name is where a consumer waits for the answer to its flow control.
const flowControl = "$JS.FC."

var (
	errReconnected = errors.New("the connection was made again")
	errGap         = errors.New("the watch lost a message")
	errSilent      = errors.New("the watch is silent")
	errRecreated   = errors.New("the stream was made again")
)

// run follows until ctx ends. loaded is called after the first scan was loaded, or with the error that prevented it, and
// then run returns.
func (f *follower) run(ctx context.Context, loaded func(error)) {
	status := f.s.nc.StatusChanged(nats.CONNECTED)
	defer f.s.nc.RemoveStatusListener(status)
	wait := followRetry
	for first := true; ; {
		started := time.Now()
		err := f.once(ctx, status, func() {
			if first {
				loaded(nil)
			}
			first = false
		})
		if ctx.Err() != nil {
			if first {
				loaded(context.Cause(ctx))
			}
			return
		}
		if first {
			loaded(err)
			return
		}
		if time.Since(started) > followRetryMax {
			wait = followRetry
		}
		if errors.Is(err, ErrMissing) {
			f.log.Error("a followed bucket is gone; what was known of it stays, unconfirmed", "error", err)
		} else {
			f.log.Info("following again", "because", err, "in", wait)
		}
		select {
		case <-ctx.Done():
			return
		case <-status:
		case <-time.After(wait):
		}
		wait = min(2*wait, followRetryMax)
	}
}

// once is one scan and the watch after it. It returns why that ended; nil only when ctx did.
func (f *follower) once(ctx context.Context, status <-chan nats.Status, loaded func()) error {
	found, err := f.scan(ctx)
	if err != nil {
		return err
	}
	w, err := f.watch(ctx, found.last+1)
	if err != nil {
		return err
	}
	defer w.close()
	f.take(found)
	loaded()

	confirm := time.NewTicker(f.s.o.ConfirmEvery)
	defer confirm.Stop()
	rescan := time.NewTimer(f.nextScan(found))
	defer rescan.Stop()
	silence := time.NewTimer(watchSilence)
	defer silence.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-status:
			return errReconnected
		case m := <-w.messages:
			silence.Reset(watchSilence)
			if err := f.receive(w, m); err != nil {
				return err
			}
		case <-silence.C:
			if len(w.messages) == 0 {
				return errSilent
			}
			silence.Reset(watchSilence)
		case <-confirm.C:
			if err := f.ask(ctx); err != nil {
				return err
			}
		case <-rescan.C:
			found, err := f.compare(ctx)
			if err != nil {
				return err
			}
			rescan.Reset(f.nextScan(found))
		}
	}
}

// scanPause is how many times as long as a scan took there is none: where the leader is slow, scans must not be why.
const scanPause = 20

// nextScan is when to scan again, after a scan that has just ended.
func (f *follower) nextScan(found scanned) time.Duration {
	return max(f.s.o.RescanEvery, scanPause*time.Since(found.at))
}

// scan reads the bucket; a memory bucket that is gone is made again first.
func (f *follower) scan(ctx context.Context) (scanned, error) {
	found, err := f.s.scan(ctx, f.bucket)
	if !errors.Is(err, natsjs.ErrStreamNotFound) {
		return found, err
	}
	name := f.bucket.stream()
	if f.s.defs[name].security {
		return scanned{}, fmt.Errorf("%w: %s", ErrMissing, name)
	}
	if err := ask(ctx, askTimeout, func(ctx context.Context) error { return f.s.ensureAgain(ctx, name) }); err != nil {
		return scanned{}, err
	}
	return f.s.scan(ctx, f.bucket)
}

// compare compares the keys with the leader's. What the watch delivered without a gap needs no second read; what it can't tell is which
// keys have gone without a marker (a purge, a marker's own expiry), and one that it should have delivered is read.
func (f *follower) compare(ctx context.Context) (scanned, error) {
	found, err := f.s.scanSome(ctx, f.bucket, func(key string) bool { return !f.knows(key) })
	if errors.Is(err, natsjs.ErrStreamNotFound) {
		return scanned{}, errRecreated
	}
	if err != nil {
		return scanned{}, err
	}
	if !found.created.Equal(f.created) || found.last < f.cursor {
		return scanned{}, errRecreated
	}
	f.load(found, false)
	return found, nil
}

func (f *follower) take(found scanned) {
	anew := !f.created.IsZero() && (!found.created.Equal(f.created) || found.last < f.cursor)
	if anew {
		f.cursor = 0
	}
	f.created, f.cursor, f.claimed = found.created, max(f.cursor, found.last), 0
	f.load(found, anew)
	f.confirm(found.at)
}

// ask asks the leader how far it is. That confirms the view at once, or when the watch has come as far.
func (f *follower) ask(ctx context.Context) error {
	at := time.Now()
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	st, err := f.s.js.Stream(ctx, f.bucket.stream())
	if errors.Is(err, natsjs.ErrStreamNotFound) {
		return errRecreated
	}
	if err != nil {
		f.log.Warn("the leader does not confirm", "error", err)
		return nil
	}
	info := st.CachedInfo()
	if !info.Created.Equal(f.created) || info.State.LastSeq < f.cursor {
		return errRecreated
	}
	if f.cursor >= info.State.LastSeq {
		f.confirm(at)
		return nil
	}
	if f.claimed == 0 {
		f.asked, f.claimed = at, info.State.LastSeq
	}
	return nil
}

// receive handles one message of the watch.
func (f *follower) receive(w *watch, m *nats.Msg) error {
	if len(m.Data) == 0 && m.Header.Get("Status") != "" {
		return w.control(m)
	}
	meta, err := m.Metadata()
	if err != nil {
		return fmt.Errorf("the watch got a message that is none of its own: %w", err)
	}
	w.delivered++
	if meta.Sequence.Consumer != w.delivered {
		return errGap
	}
	f.apply(f.bucket.entry(m.Subject, m.Header, m.Data, meta.Sequence.Stream))
	f.cursor = max(f.cursor, meta.Sequence.Stream)
	if f.claimed > 0 && f.cursor >= f.claimed {
		f.confirm(f.asked)
		f.claimed = 0
	}
	return nil
}

// watch is an ephemeral push consumer and its subscription.
type watch struct {
	s         *Store
	stream    string
	name      string
	sub       *nats.Subscription
	messages  chan *nats.Msg
	delivered uint64
}

// watch delivers everything from sequence from on.
func (f *follower) watch(ctx context.Context, from uint64) (*watch, error) {
	w := &watch{
		s: f.s, stream: f.bucket.stream(), messages: make(chan *nats.Msg, watchBuffer),
		name: schemas.NewID(), // given here, so that asking twice makes one
	}
	inbox := f.s.nc.NewInbox()
	sub, err := f.s.nc.ChanSubscribe(inbox, w.messages)
	if err != nil {
		return nil, fmt.Errorf("watch %s: %w", f.bucket, err)
	}
	w.sub = sub
	if err := ask(ctx, askTimeout, func(ctx context.Context) error {
		_, err := f.s.js.CreatePushConsumer(ctx, w.stream, natsjs.ConsumerConfig{
			Name: w.name, DeliverSubject: inbox, DeliverPolicy: natsjs.DeliverByStartSequencePolicy, OptStartSeq: from,
			AckPolicy: natsjs.AckNonePolicy, MaxDeliver: 1, FlowControl: true, IdleHeartbeat: watchHeartbeat,
			InactiveThreshold: 30 * time.Second, MemoryStorage: true, Replicas: 1,
		})
		return err
	}); err != nil {
		return nil, errors.Join(readError("watch "+string(f.bucket), err), sub.Unsubscribe())
	}
	return w, nil
}

// control answers flow control and compares an idle heartbeat with what came.
func (w *watch) control(m *nats.Msg) error {
	asks := cmp.Or(m.Reply, m.Header.Get("Nats-Consumer-Stalled"))
	if strings.HasPrefix(asks, flowControl+w.stream+".") { // and nowhere else, whoever wrote the message
		if err := w.s.nc.Publish(asks, nil); err != nil {
			return fmt.Errorf("answer flow control: %w", err)
		}
	}
	if m.Reply != "" {
		return nil
	}
	if last := m.Header.Get("Nats-Last-Consumer"); last != "" && last != strconv.FormatUint(w.delivered, 10) {
		return errGap
	}
	return nil
}

// close ends the watch. The server forgets the consumer by itself if it can't be told.
func (w *watch) close() {
	if err := w.sub.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
		w.s.o.Log.Debug("end of a watch", "error", err)
	}
	if !w.s.nc.IsConnected() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), askTimeout)
	defer cancel()
	if err := w.s.js.DeleteConsumer(ctx, w.stream, w.name); err != nil {
		w.s.o.Log.Debug("end of a watch", "error", err)
	}
}
