package runner

import (
	"context"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/org-runink/runbus/runner/tunnel"
)

// roots are the system's and those of the CA file; nil without one: the system's.
func (c *Config) roots() (*x509.CertPool, error) {
	if c.CA == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(c.CA)
	if err != nil {
		return nil, &ExitError{Code: ExitConfig, Err: fmt.Errorf("RUNNER_ENROLL_CA: %w", err)}
	}
	pool, err := x509.SystemCertPool()
	if err != nil {
		pool = x509.NewCertPool()
	}
	if !pool.AppendCertsFromPEM(pem) {
		return nil, configError("RUNNER_ENROLL_CA: %s holds no PEM certificate", c.CA)
	}
	return pool, nil
}

// tunnel is how the control plane is dialled; sources are not dialled by it.
func (c *Config) tunnel() (*tunnel.Dialer, error) {
	roots, err := c.roots()
	if err != nil {
		return nil, err
	}
	d, err := tunnel.New(c.Proxy, roots)
	if err != nil {
		return nil, &ExitError{Code: ExitConfig, Err: err}
	}
	return d, nil
}

// dialer is a nats.CustomDialer. The end of its context ends a dial or a handshake under way, and the connections too: nats.go
// holds its lock meanwhile, so that even Close would wait.
type dialer struct {
	ctx    context.Context //nolint:containedctx // nats.go passes none
	tunnel *tunnel.Dialer
	limit  time.Duration
	poll   *polling // of its connections; nil: they don't
}

// Dial connects to addr within limit.
func (d *dialer) Dial(network, addr string) (net.Conn, error) {
	deadline := time.Now().Add(d.limit)
	ctx, cancel := context.WithDeadline(d.ctx, deadline)
	defer cancel()
	c, err := d.tunnel.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	// nats.go sets no limit on the TLS handshake of a WebSocket. It replaces this one when it begins with its own protocol.
	if err := c.SetDeadline(deadline); err != nil {
		_ = c.Close()
		return nil, err
	}
	return &boundConn{Conn: d.poll.conn(c), unbind: context.AfterFunc(d.ctx, func() { _ = c.Close() })}, nil
}

// boundConn is a connection that ends with its dialer's context.
type boundConn struct {
	net.Conn
	unbind func() bool
}

// Close ends the connection.
func (c *boundConn) Close() error {
	c.unbind()
	return c.Conn.Close()
}
