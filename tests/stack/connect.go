package stack

import (
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/internal/natsdial"
)

// Connect is nats.Connect that waits as long as tests do. A server gives a client 1.8 s, which one on a busy machine may not need
// itself: whom it turns away with that word tries again, as the product's own clients do.
func Connect(url string, options ...nats.Option) (*nats.Conn, error) {
	for give := time.Now().Add(Patience); ; {
		nc, err := natsdial.Connect(Patience, url, append([]nats.Option{nats.Timeout(Patience)}, options...)...)
		if err == nil || !strings.Contains(strings.ToLower(err.Error()), "authentication timeout") || time.Now().After(give) {
			return nc, err
		}
	}
}
