package link

import (
	"net"
	"time"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// UserTimeout is the TCP user timeout of a link's socket, at both ends: longer than the pings of the NATS client on it take to find a
// dead link.
const UserTimeout = 20 * time.Second

// Offer sends the preface of a link over conn, whose handshake is done, and waits for the runner's answer until the deadline. Nil: the
// runner takes the link, and what comes next on conn is NATS. The runner's refusal is a *schemas.Error of its own code (CodeConflict
// for `linked elsewhere`).
func Offer(conn net.Conn, deadline time.Time, p *runbusv1.LinkPreface) error {
	if err := conn.SetDeadline(deadline); err != nil {
		return err
	}
	if err := WriteFrame(conn, p); err != nil {
		return err
	}
	var answer runbusv1.LinkAnswer
	if err := ReadFrame(conn, &answer); err != nil {
		return err
	}
	if err := foreign(answer.GetError()); err != nil {
		return err
	}
	return conn.SetDeadline(time.Time{})
}

// Receive reads the preface that Offer sent, until the deadline.
func Receive(conn net.Conn, deadline time.Time) (*runbusv1.LinkPreface, error) {
	if err := conn.SetDeadline(deadline); err != nil {
		return nil, err
	}
	p := new(runbusv1.LinkPreface)
	if err := ReadFrame(conn, p); err != nil {
		return nil, err
	}
	return p, nil
}

// Take answers a preface: the link is in use from now on, and conn has no deadline any more.
func Take(conn net.Conn) error {
	if err := WriteFrame(conn, &runbusv1.LinkAnswer{}); err != nil {
		return err
	}
	return conn.SetDeadline(time.Time{})
}

// Refuse answers a preface with why not. It is best effort: whoever dials sees the connection end anyway.
func Refuse(conn net.Conn, why error) {
	_ = WriteFrame(conn, &runbusv1.LinkAnswer{Error: schemas.ToDetail(why)})
}

// ErrLinkedElsewhere refuses a second link while the first one answers (SPEC C11).
func ErrLinkedElsewhere() *schemas.Error {
	return schemas.Errorf(schemas.CodeConflict, "linked elsewhere")
}
