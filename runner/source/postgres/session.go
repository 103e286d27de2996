package postgres

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/org-runink/runbus/schemas"
)

const (
	// readBuffer is what one read from the connection takes at most while rows are small.
	readBuffer = 256 << 10
	// maxMessage bounds a message of the server, thus a row, in bytes.
	maxMessage = 128 << 20
	// cancelWithin bounds the attempt to tell the server that a query is not wanted any more; then the connection is cut.
	cancelWithin = 700 * time.Millisecond
	// cancelEvery is the time between two such attempts.
	cancelEvery = 50 * time.Millisecond
	// leaveWithin bounds the wait for the server to end a session that was said goodbye to.
	leaveWithin = 500 * time.Millisecond
)

// session is an authenticated connection. pgconn opens it; from then on messages are read here, because rows go from the
// read buffer into the builders without being copied or wrapped. Only interrupt may be called from another goroutine.
type session struct {
	conn      net.Conn  // TLS if there is any
	reader    io.Reader // of conn; nothing reads from conn itself
	cut       func() error
	cancel    func(ctx context.Context) error // asks the server to cancel the query that runs
	cancelled sync.Once
	over      chan struct{} // closed when nobody reads any more
	finish    sync.Once
	note      func(text string)

	buf         []byte
	start, fill int
}

// open connects and authenticates. note gets the server's notices.
func open(ctx context.Context, t target, note func(text string)) (*session, error) {
	// pgconn may still have a read of its own under way when it hands the connection over (it starts one when a write is slow):
	// what that takes is to be had from pgconn's reader alone.
	var reader io.Reader
	t.config.BuildFrontend = func(r io.Reader, w io.Writer) *pgproto3.Frontend {
		reader = r
		return pgproto3.NewFrontend(r, w)
	}
	within, done := context.WithTimeout(ctx, connectWithin)
	defer done()
	pg, err := pgconn.ConnectConfig(within, t.config)
	if err != nil {
		return nil, connectError(t, err)
	}
	hijacked, err := pg.Hijack()
	if err != nil {
		return nil, errors.Join(err, pg.Conn().Close())
	}
	s := &session{conn: hijacked.Conn, reader: reader, cut: hijacked.Conn.Close, cancel: pg.CancelRequest, over: make(chan struct{}), note: note, buf: make([]byte, readBuffer)}
	if secure, ok := hijacked.Conn.(*tls.Conn); ok {
		s.cut = secure.NetConn().Close // without waiting for a close_notify to be taken
	}
	// What came with the last message of the start is in pgconn's buffer: whole or in part, it ends a message.
	for hijacked.Frontend.ReadBufferLen() > 0 {
		if _, err := hijacked.Frontend.Receive(); err != nil {
			return nil, errors.Join(connectError(t, err), s.cut())
		}
	}
	return s, nil
}

// stopWith interrupts the session when ctx ends. The function it returns waits until that can't happen any more.
func (s *session) stopWith(ctx context.Context) func() {
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(interrupted)
		s.interrupt()
	})
	return func() {
		s.finished()
		if !stop() {
			<-interrupted
		}
	}
}

// finished tells interrupt that nobody reads any more.
func (s *session) finished() { s.finish.Do(func() { close(s.over) }) }

// interrupt cancels what runs at the server, then cuts the connection; a read that waits fails. It takes less than a second.
//
// The server ignores a cancel request that comes between two statements: so it is repeated until the read has ended, by the
// server's answer to it.
func (s *session) interrupt() {
	s.cancelled.Do(func() {
		ctx, done := context.WithTimeout(context.Background(), cancelWithin)
		defer done()
		defer s.cut() //nolint:errcheck // the session is over either way
		again := time.NewTicker(cancelEvery)
		defer again.Stop()
		for {
			// Best effort: what this does not reach ends by the cut, or by client_connection_check_interval.
			_ = s.cancel(ctx)
			select {
			case <-s.over:
				return
			case <-ctx.Done():
				return
			case <-again.C:
			}
		}
	})
}

// close ends the session and waits a moment for the server to have ended it too.
func (s *session) close() {
	defer s.cut() //nolint:errcheck // the session is over either way
	if err := s.conn.SetDeadline(time.Now().Add(leaveWithin)); err != nil {
		return
	}
	if err := s.send(&pgproto3.Query{String: "ROLLBACK"}, &pgproto3.Terminate{}); err != nil {
		return
	}
	for {
		if _, err := s.reader.Read(s.buf); err != nil {
			return
		}
	}
}

// send writes messages in one write.
func (s *session) send(messages ...pgproto3.FrontendMessage) error {
	var out []byte
	for _, m := range messages {
		var err error
		if out, err = m.Encode(out); err != nil {
			return schemas.Errorf(schemas.CodeInvalid, "the query can't be sent: %s", err.Error())
		}
	}
	_, err := s.conn.Write(out)
	return lost(err)
}

// receive is the next message but notices and the like, which are handled here. The body is valid until the next receive.
func (s *session) receive() (kind byte, body []byte, err error) {
	for {
		if err := s.need(5); err != nil {
			return 0, nil, err
		}
		kind = s.buf[s.start]
		size := int(int32(binary.BigEndian.Uint32(s.buf[s.start+1:])))
		if size < 4 || size > maxMessage {
			if kind == 'D' && size > 0 {
				return 0, nil, schemas.Errorf(schemas.CodeSource, "PostgreSQL sent a row of %d bytes: at most %d are taken", size, maxMessage).WithHint("select fewer or smaller columns")
			}
			return 0, nil, protocolError("a message %q of %d bytes", kind, size)
		}
		if err := s.need(1 + size); err != nil {
			return 0, nil, err
		}
		body = s.buf[s.start+5 : s.start+1+size]
		s.start += 1 + size
		switch kind {
		case 'N':
			var n pgproto3.NoticeResponse
			if err := n.Decode(body); err != nil {
				return 0, nil, protocolError("a notice: %s", err)
			}
			s.note(fmt.Sprintf("PostgreSQL: %s: %s", clip(n.Severity), clip(n.Message)))
		case 'S', 'A': // a parameter changed; a notification
		default:
			return kind, body, nil
		}
	}
}

// need reads until n unread bytes are there.
func (s *session) need(n int) error {
	if s.fill-s.start >= n {
		return nil
	}
	switch {
	case s.start == s.fill:
		s.start, s.fill = 0, 0
		if len(s.buf) > readBuffer && n <= readBuffer {
			s.buf = make([]byte, readBuffer) // after one large row
		}
	case s.start+n > len(s.buf):
		s.fill = copy(s.buf, s.buf[s.start:s.fill])
		s.start = 0
	}
	for s.fill-s.start < n {
		if s.fill == len(s.buf) { // grow with what arrives, not with what is announced
			larger := make([]byte, min(2*len(s.buf), max(n, len(s.buf)+1)))
			copy(larger, s.buf[:s.fill])
			s.buf = larger
		}
		read, err := s.reader.Read(s.buf[s.fill:])
		s.fill += read
		if err != nil && s.fill-s.start < n {
			return lost(err)
		}
	}
	return nil
}

// failure is the error in an ErrorResponse.
func failure(body []byte) error {
	var e pgproto3.ErrorResponse
	if err := e.Decode(body); err != nil {
		return protocolError("an error: %s", err)
	}
	return serverError(e.Severity, e.Code, e.Message, e.Hint, e.Position)
}

// query runs a statement of ours in the simple protocol, or several, and returns the rows as text. sent tells that it was
// sent before.
func (s *session) query(sql string, sent bool) ([][]string, error) {
	if !sent {
		if err := s.send(&pgproto3.Query{String: sql}); err != nil {
			return nil, err
		}
	}
	var rows [][]string
	var failed error
	for {
		kind, body, err := s.receive()
		switch {
		case err != nil:
			return nil, errors.Join(failed, err)
		case kind == 'D':
			var row pgproto3.DataRow
			if err := row.Decode(body); err != nil {
				return nil, protocolError("a row: %s", err)
			}
			cells := make([]string, len(row.Values))
			for i, v := range row.Values {
				cells[i] = string(v)
			}
			rows = append(rows, cells)
		case kind == 'E':
			failed = failure(body)
		case kind == 'Z':
			return rows, failed
		}
	}
}

// clip bounds a notice, of which many may come.
func clip(text string) string {
	const most = 2000
	if len(text) > most {
		text = text[:most] + "…"
	}
	return strings.ToValidUTF8(text, "�")
}

func protocolError(format string, args ...any) error {
	return schemas.Errorf(schemas.CodeSource, "PostgreSQL broke its protocol: "+format, args...)
}

// lost names the end of the connection; nil stays nil.
func lost(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return schemas.Errorf(schemas.CodeSource, "the connection to PostgreSQL was lost: %w", err).WithHint("the server's log may say why")
}
