package cp

import (
	"context"
	"fmt"
	"slices"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus/embedded"
)

// conn is a connection of this process to its own server. It is closed at the end. The end of ctx is not kept waiting: what is being made then
// ends with the server.
func (c *ControlPlane) conn(ctx context.Context, u embedded.User, o ...nats.Option) (*nats.Conn, error) {
	o = append(o, nats.Name("runbus-"+string(u)+"/"+c.replica[:8]), nats.MaxReconnects(-1))
	type made struct {
		nc  *nats.Conn
		err error
	}
	result := make(chan made)
	go func() {
		nc, err := c.server.Connect(u, o...)
		select {
		case result <- made{nc, err}:
		case <-ctx.Done():
			if err == nil {
				nc.Close()
			}
		}
	}()
	var m made
	select {
	case m = <-result:
	case <-ctx.Done():
		m.err = ctx.Err()
	}
	if m.err != nil {
		return nil, fmt.Errorf("connect as %s: %w", u, m.err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conns = append(c.conns, m.nc)
	return m.nc, nil
}

func (c *ControlPlane) connections() []*nats.Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.conns)
}
