package registrytest

import (
	"bytes"
	"net"

	"github.com/nats-io/nats.go"
)

// Meddle has each write of a client of the test's server that contains mark wait for pass, and with it whatever the client is to write after
// that. What pass returns false for is lost.
func Meddle(mark string, pass func() bool) nats.Option {
	return func(o *nats.Options) error {
		o.InProcessServer = &meddler{o.InProcessServer, []byte(mark), pass}
		return nil
	}
}

type meddler struct {
	server nats.InProcessConnProvider
	mark   []byte
	pass   func() bool
}

// InProcessConn is a new connection.
func (m *meddler) InProcessConn() (net.Conn, error) {
	conn, err := m.server.InProcessConn()
	return &meddled{conn, m}, err
}

type meddled struct {
	net.Conn
	by *meddler
}

// Write writes, or seems to.
func (c *meddled) Write(b []byte) (int, error) {
	if bytes.Contains(b, c.by.mark) && !c.by.pass() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}
