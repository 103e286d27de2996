// Package natsdial connects to a NATS server on hosts that may be slow.
package natsdial

import (
	"errors"
	"io"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// pause keeps a server that answers at once, and wrongly, from being dialled without end.
const pause = 100 * time.Millisecond

// Connect is nats.Connect, again as long as a try fails for no other reason than that it was slow, until within is over. A server sends its
// first ping a second or two after it took a connection, and nats.go takes it for a wrong answer when it comes before the pong
// that ends the handshake; and it turns away whom it does not know by then, with a word that does not always come through a pipe within one
// process. Between two tries are 100 ms. Any other error is returned at once. No handler of the options is called for a try that failed.
func Connect(within time.Duration, url string, options ...nats.Option) (*nats.Conn, error) {
	for give := time.Now().Add(within); ; {
		nc, err := nats.Connect(url, options...)
		if err == nil || !slow(err) || time.Now().After(give) {
			return nc, err
		}
		<-time.After(pause)
	}
}

// slow reports whether a try that failed with err may have been too slow for the server, and no more than that.
func slow(err error) bool {
	text := strings.ToLower(err.Error())
	return strings.Contains(text, "expected 'pong', got 'ping'") || strings.Contains(text, "authentication timeout") || errors.Is(err, io.ErrClosedPipe)
}
