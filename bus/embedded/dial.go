package embedded

import (
	"fmt"
	"net"
)

// Dial opens a connection to the server inside the process, for a client that speaks NATS over it without TLS: one that is
// authenticated already (a dialled runner), as far as TLS can. The callout decides on it as on any other. What is written waits
// until the other side reads it. The server closes it when it stops.
func (s *Server) Dial() (net.Conn, error) {
	conn, err := s.ns.InProcessConn()
	if err != nil {
		return nil, fmt.Errorf("connect inside the process: %w", err)
	}
	return conn, nil
}
