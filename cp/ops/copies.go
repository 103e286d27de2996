package ops

import (
	"log/slog"
	"sync"
	"sync/atomic"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
)

// Bounds of what waits to be copied.
const (
	copiesQueued      = 1024
	copiesQueuedBytes = 16 << 20
)

// Copies repeats work and control messages in account OPS, so that `nats sub 'runbus.v1.>'` there shows a whole dispatch.
// The subjects themselves are not imported into OPS: a watcher there would count as a listener, and hide that a runner is
// gone. Credentials in a copy are sealed to the runner, as in the original. Safe for concurrent use.
type Copies struct {
	publish func(*nats.Msg) error
	log     *slog.Logger
	queue   chan *nats.Msg
	bytes   atomic.Int64 // in queue
	dropped atomic.Uint64

	stop    sync.Once
	stopped chan struct{}
	done    chan struct{}
}

// NewCopies starts to copy on nc, the connection of embedded.UserMicro, until Close. A nil log means slog.Default().
func NewCopies(nc *nats.Conn, log *slog.Logger) *Copies {
	if log == nil {
		log = slog.Default()
	}
	return newCopies(nc.PublishMsg, log)
}

func newCopies(publish func(*nats.Msg) error, log *slog.Logger) *Copies {
	c := &Copies{publish: publish, log: log, queue: make(chan *nats.Msg, copiesQueued), stopped: make(chan struct{}), done: make(chan struct{})}
	go c.run()
	return c
}

// Publish copies m, as it was sent to subject, with the same headers and no reply subject. It never blocks and never
// fails the caller: what doesn't fit into the queue (1024 messages, 16 MiB) is dropped and counted.
func (c *Copies) Publish(subject string, m proto.Message) {
	select {
	case <-c.stopped:
		return
	default:
	}
	msg, err := bus.NewMsg(subject, m)
	if err != nil {
		c.drop("a message cannot be copied for ops", "subject", subject, "error", err)
		return
	}
	size := int64(msg.Size())
	if c.bytes.Add(size) > copiesQueuedBytes {
		c.bytes.Add(-size)
		c.drop("copies for ops are dropped: the queue is full", "subject", subject)
		return
	}
	select {
	case c.queue <- msg:
	default:
		c.bytes.Add(-size)
		c.drop("copies for ops are dropped: the queue is full", "subject", subject)
	}
}

// Dropped is how many copies were not sent.
func (c *Copies) Dropped() uint64 { return c.dropped.Load() }

// Close hands what is queued to the connection and ends. What is published later is not copied. The connection stays open.
func (c *Copies) Close() {
	c.stop.Do(func() { close(c.stopped) })
	<-c.done
}

func (c *Copies) run() {
	defer close(c.done)
	for {
		select {
		case msg := <-c.queue:
			c.send(msg)
		case <-c.stopped:
			for {
				select {
				case msg := <-c.queue:
					c.send(msg)
				default:
					return
				}
			}
		}
	}
}

func (c *Copies) send(msg *nats.Msg) {
	c.bytes.Add(-int64(msg.Size()))
	if err := c.publish(msg); err != nil {
		c.drop("a copy for ops was not sent", "subject", msg.Subject, "error", err)
	}
}

// drop counts, and logs the 1st, 2nd, 4th, 8th… time, so that a long outage fills no log.
func (c *Copies) drop(text string, args ...any) {
	if n := c.dropped.Add(1); n&(n-1) == 0 {
		c.log.Warn(text, append(args, "dropped", n)...)
	}
}
