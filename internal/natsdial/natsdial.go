// Package natsdial connects to a NATS server on hosts that may be slow.
package natsdial

import (
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// pause keeps a server that answers at once, and wrongly, from being dialled without end.
const pause = 100 * time.Millisecond

// Connect is nats.Connect, again as long as a try fails for no other reason than that it was slow, until within is over. A server sends its
// first ping a second or two after it took a connection, and nats.go takes it for a wrong answer when it comes before the pong
// that ends the handshake. Between two tries are 100 ms. Any other error is returned at once. No handler of the options is called for a try that failed.
func Connect(within time.Duration, url string, options ...nats.Option) (*nats.Conn, error) {
	for give := time.Now().Add(within); ; {
		nc, err := nats.Connect(url, options...)
		if err == nil || !strings.Contains(err.Error(), "expected 'PONG', got 'PING'") || time.Now().After(give) {
			return nc, err
		}
		<-time.After(pause)
	}
}
