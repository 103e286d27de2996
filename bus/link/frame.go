package link

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"google.golang.org/protobuf/proto"
)

// MaxFrame is the most bytes that the message of one frame may have.
const MaxFrame = 64 << 10

// ErrFrame says that what came is not a frame of the message that was expected. The peer is at fault, not the network.
var ErrFrame = errors.New("not a valid frame")

// ReadFrame reads one frame, four bytes of length (big-endian) and as many of protobuf, into into. It reads no byte more than
// the frame has. A length over MaxFrame, or bytes that are no such message, are ErrFrame; a stream that ends in a frame is
// io.ErrUnexpectedEOF, one that ends before it io.EOF. It does not limit the time: set a deadline on the connection.
func ReadFrame(r io.Reader, into proto.Message) error {
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(head[:])
	if n > MaxFrame {
		return fmt.Errorf("%w: %d bytes are announced, at most %d are allowed", ErrFrame, n, MaxFrame)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return err
	}
	if err := proto.Unmarshal(body, into); err != nil {
		// The decoder's own text may quote what it read.
		return fmt.Errorf("%w: it holds no %s", ErrFrame, into.ProtoReflect().Descriptor().Name())
	}
	return nil
}

// WriteFrame writes m as one frame in one write. A message over MaxFrame is ErrFrame, and nothing is written.
func WriteFrame(w io.Writer, m proto.Message) error {
	body, err := proto.MarshalOptions{}.MarshalAppend(make([]byte, 4, 256), m)
	if err != nil {
		return fmt.Errorf("encode %s: %w", m.ProtoReflect().Descriptor().Name(), err)
	}
	n := len(body) - 4
	if n > MaxFrame {
		return fmt.Errorf("%w: %s has %d bytes, at most %d are allowed", ErrFrame, m.ProtoReflect().Descriptor().Name(), n, MaxFrame)
	}
	binary.BigEndian.PutUint32(body, uint32(n))
	_, err = w.Write(body)
	return err
}
