package chaos

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"io"
	"strconv"
)

// reader reads one unit of a direction of a link: a message, or some bytes. mayRepeat: it is a message that may come twice.
type reader func(in *bufio.Reader) (b []byte, mayRepeat bool, err error)

// readBytes reads what there is.
func readBytes(in *bufio.Reader) (b []byte, mayRepeat bool, err error) {
	b = make([]byte, 32<<10)
	n, err := in.Read(b)
	return b[:n], false, err
}

// readUnit reads a line of the protocol and its payload. Messages of the work itself (assignments, frames, credit, orders) may
// come twice: a hello or heartbeat that does is another process's word.
func readUnit(in *bufio.Reader) (b []byte, mayRepeat bool, err error) {
	line, err := in.ReadBytes('\n')
	if err != nil {
		return nil, false, err
	}
	fields := bytes.Fields(line)
	if len(fields) < 3 {
		return line, false, nil
	}
	switch string(bytes.ToUpper(fields[0])) {
	case "PUB", "HPUB", "MSG", "HMSG":
	default:
		return line, false, nil
	}
	size, err := strconv.Atoi(string(fields[len(fields)-1]))
	if err != nil {
		return nil, false, err
	}
	subject := fields[1]
	b = make([]byte, len(line)+size+2)
	if _, err := io.ReadFull(in, b[copy(b, line):]); err != nil {
		return nil, false, err
	}
	for _, kind := range []string{".work.", ".credit.", ".result.", ".control."} {
		mayRepeat = mayRepeat || bytes.Contains(subject, []byte(kind))
	}
	return b, mayRepeat, nil
}

// readPreface reads the frame with which each side of a dialled link begins, and units after it.
func readPreface() reader {
	begun := false
	return func(in *bufio.Reader) ([]byte, bool, error) {
		if begun {
			return readUnit(in)
		}
		begun = true
		var head [4]byte
		if _, err := io.ReadFull(in, head[:]); err != nil {
			return nil, false, err
		}
		b := append(head[:], make([]byte, binary.BigEndian.Uint32(head[:]))...)
		_, err := io.ReadFull(in, b[len(head):])
		return b, false, err
	}
}

// webSocket reads one direction of a WebSocket connection.
type webSocket struct {
	client bool          // this direction is the client's, whose frames are masked
	frames *bufio.Reader // nil before the head of HTTP was read
	units  *bufio.Reader // over the payload of the frames
	left   int           // bytes of the present frame's payload
	key    [4]byte       // of the present frame
	at     int           // in the key
}

// The first byte of a frame of data that is a message by itself, and the bits that both sides of NATS leave out of others.
const (
	wsWhole   = 0x82
	wsControl = 0x08
	wsMasked  = 0x80
)

// readWebSocket reads the head of HTTP, then units, whatever frames they come in. Each goes on in a frame of its own.
func readWebSocket(client bool) reader {
	s := &webSocket{client: client}
	return func(in *bufio.Reader) (b []byte, mayRepeat bool, err error) {
		if s.frames == nil {
			s.frames, s.units = in, bufio.NewReaderSize(s, 64<<10)
			return readHead(in)
		}
		if b, mayRepeat, err = readUnit(s.units); err != nil {
			return nil, false, err
		}
		return s.frame(b), mayRepeat, nil
	}
}

// readHead reads up to the empty line.
func readHead(in *bufio.Reader) (b []byte, mayRepeat bool, err error) {
	for !bytes.HasSuffix(b, []byte("\r\n\r\n")) {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return nil, false, err
		}
		b = append(b, line...)
	}
	return b, false, nil
}

// frame is a frame with this payload. A client's has the key of zeros, which changes nothing.
func (s *webSocket) frame(payload []byte) []byte {
	b := []byte{wsWhole, 127}
	b = binary.BigEndian.AppendUint64(b, uint64(len(payload)))
	if s.client {
		b[1] |= wsMasked
		b = append(b, 0, 0, 0, 0)
	}
	return append(b, payload...)
}

// Read reads the payload of the frames. A frame that is no data is a close, with which a connection ends.
func (s *webSocket) Read(p []byte) (int, error) {
	for s.left == 0 {
		var head [2]byte
		if _, err := io.ReadFull(s.frames, head[:]); err != nil {
			return 0, err
		}
		if head[0]&wsControl != 0 {
			return 0, io.EOF
		}
		s.left = int(head[1] &^ wsMasked)
		var long [8]byte
		switch s.left {
		case 126:
			if _, err := io.ReadFull(s.frames, long[:2]); err != nil {
				return 0, err
			}
			s.left = int(binary.BigEndian.Uint16(long[:]))
		case 127:
			if _, err := io.ReadFull(s.frames, long[:]); err != nil {
				return 0, err
			}
			s.left = int(binary.BigEndian.Uint64(long[:]))
		}
		if s.client {
			if _, err := io.ReadFull(s.frames, s.key[:]); err != nil {
				return 0, err
			}
		}
		s.at = 0
	}
	n, err := s.frames.Read(p[:min(len(p), s.left)])
	if s.client {
		for i := range p[:n] {
			p[i] ^= s.key[s.at%4]
			s.at++
		}
	}
	s.left -= n
	return n, err
}
