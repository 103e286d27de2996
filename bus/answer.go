package bus

import (
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/schemas"
)

// ErrForeignReply says that a request asked for its answer somewhere else than in its sender's own inbox.
var ErrForeignReply = errors.New("the reply subject is not an inbox of the runner that asked")

// Answer answers a message of a runner. It is the only way in which this platform answers one: the reply subject is
// foreign text, and whoever publishes to it unread can be made to write buckets or delete streams. The answer goes out only if
// the request came on `runbus.v1.<t>.runner.<r>.…` and its reply is `runbus.v1.<t>.runner.<r>.inbox.…` with the same t
// and r and no wildcard; else the error is ErrForeignReply (errors.Is) and nothing is published.
func (c *Conn) Answer(request *nats.Msg, m proto.Message) error {
	from, err := schemas.Parse(request.Subject)
	if err != nil {
		return fmt.Errorf("%w: request on %q", ErrForeignReply, clip(request.Subject))
	}
	to, err := schemas.Parse(request.Reply)
	if err != nil || to.Kind != schemas.KindInbox || to.Ref != from.Ref {
		return fmt.Errorf("%w: runner %s, reply %q", ErrForeignReply, from.Ref, clip(request.Reply))
	}
	return c.Publish(to.String(), m)
}
