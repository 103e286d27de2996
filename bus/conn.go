package bus

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/schemas"
)

// ErrNoResponders says that nobody was subscribed: the message reached no one.
var ErrNoResponders = errors.New("nobody is listening on the subject")

// ErrClosed says that the stream, or the connection's side of all streams, was closed here.
var ErrClosed = errors.New("closed")

// requestTimeout bounds a Request or an Order whose context has no deadline.
const requestTimeout = 10 * time.Second

// Conn is one NATS connection that speaks the bus's envelope. It is safe for concurrent use. It does not own the
// connection: whoever opened it closes it.
type Conn struct {
	nc      *nats.Conn
	answers answers
}

// NewConn wraps nc.
func NewConn(nc *nats.Conn) *Conn { return &Conn{nc: nc} }

// NATS is the connection itself.
func (c *Conn) NATS() *nats.Conn { return c.nc }

// Publish sends m. Nil means that it was handed to the connection, not that it arrived: what is in flight when the link is
// cut is lost. While the link is down a connection without reconnect buffer returns an error that IsLinkError knows.
func (c *Conn) Publish(subject string, m proto.Message) error {
	return c.PublishWithReply(subject, "", m)
}

// PublishWithReply is Publish with a reply subject; if nobody is subscribed to subject, the server sends a message of
// status 503 there.
func (c *Conn) PublishWithReply(subject, reply string, m proto.Message) error {
	msg, err := NewMsg(subject, m)
	if err != nil {
		return err
	}
	msg.Reply = reply
	return c.publish(msg)
}

// publish is the one place where messages of the bus leave this process.
func (c *Conn) publish(msg *nats.Msg) error {
	if err := c.nc.PublishMsg(msg); err != nil {
		return fmt.Errorf("publish %s to %s: %w", TypeOf(msg), msg.Subject, err)
	}
	return nil
}

// IsLinkError reports whether an error of Publish says that the link is down, rather than that the message is wrong: the
// message may be sent again when the link is back.
func IsLinkError(err error) bool {
	for _, wrong := range []error{nats.ErrBadSubject, nats.ErrMaxPayload, nats.ErrHeadersNotSupported, nats.ErrInvalidConnection} {
		if errors.Is(err, wrong) {
			return false
		}
	}
	var e *schemas.Error
	return err != nil && !errors.As(err, &e)
}

// Subscribe calls h for each message, one at a time, in order. The queue in front of h has no limit, so that a burst is
// never dropped here: h must not block, and what it keeps must be bounded by it.
func (c *Conn) Subscribe(subject string, h func(*nats.Msg)) (*nats.Subscription, error) {
	return c.QueueSubscribe(subject, "", h)
}

// QueueSubscribe is Subscribe as a member of a queue group: each message goes to one member.
func (c *Conn) QueueSubscribe(subject, queue string, h func(*nats.Msg)) (*nats.Subscription, error) {
	sub, err := c.nc.QueueSubscribe(subject, queue, h)
	if err != nil {
		return nil, fmt.Errorf("subscribe %s: %w", subject, err)
	}
	if err := sub.SetPendingLimits(-1, -1); err != nil {
		return nil, errors.Join(fmt.Errorf("subscribe %s: %w", subject, err), sub.Unsubscribe())
	}
	return sub, nil
}

// Request publishes m and decodes the first answer into into. It returns ErrNoResponders when nobody listens on subject,
// the context's error when no answer came in time (10 s if ctx has no deadline), and an error of CodeInvalid when the answer
// is not a message of into's type. Answers come to the connection's inbox prefix (nats.CustomInboxPrefix).
func (c *Conn) Request(ctx context.Context, subject string, m, into proto.Message) error {
	ctx, cancel := withDeadline(ctx)
	defer cancel()
	reply, answer, err := c.answers.expect(c)
	if err != nil {
		return err
	}
	defer c.answers.forget(reply)
	if err := c.PublishWithReply(subject, reply, m); err != nil {
		return err
	}
	select {
	case msg := <-answer:
		if isNoResponders(msg) {
			return fmt.Errorf("request %s: %w", subject, ErrNoResponders)
		}
		return Decode(msg, into)
	case <-ctx.Done():
		return fmt.Errorf("request %s: %w", subject, ctx.Err())
	}
}

// withDeadline bounds ctx by requestTimeout if it has no deadline of its own.
func withDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, requestTimeout)
}

// answers hands the answers of all requests of one connection out of one subscription, made at the first request.
type answers struct {
	mu      sync.Mutex
	prefix  string // of all reply subjects, with the last dot; "" until subscribed
	last    uint64
	waiting map[string]chan *nats.Msg // by last token
}

func (a *answers) expect(c *Conn) (reply string, answer <-chan *nats.Msg, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.prefix == "" {
		prefix := c.nc.NewInbox() + "."
		if _, err := c.Subscribe(prefix+"*", a.deliver); err != nil {
			return "", nil, err
		}
		a.prefix, a.waiting = prefix, make(map[string]chan *nats.Msg)
	}
	a.last++
	token := strconv.FormatUint(a.last, 36)
	ch := make(chan *nats.Msg, 1)
	a.waiting[token] = ch
	return a.prefix + token, ch, nil
}

func (a *answers) forget(reply string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.waiting, reply[len(a.prefix):])
}

func (a *answers) deliver(msg *nats.Msg) {
	token := msg.Subject[strings.LastIndexByte(msg.Subject, '.')+1:]
	a.mu.Lock()
	ch := a.waiting[token]
	delete(a.waiting, token)
	a.mu.Unlock()
	if ch != nil {
		ch <- msg // has room for the one message that can come
	}
}

// isNoResponders knows the server's message that nobody was subscribed.
func isNoResponders(msg *nats.Msg) bool {
	return len(msg.Data) == 0 && msg.Header.Get("Status") == "503"
}
