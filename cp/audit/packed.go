package audit

import (
	"errors"
	"fmt"

	"github.com/klauspost/compress/s2"
)

const (
	// packFrom is from how many bytes on a batch is stored packed: about 100 events, which come together only where dispatches end by the
	// thousand a second, or the disk is slow. What is smaller can be read in the stream as it is. Packed, a batch of dispatches is a seventh
	// (measured: 45 bytes an event for 330), so that what comes next, from the bus to the mirror's file, has as much less to copy, to hash and to
	// write; to pack an event takes 0.06 us.
	packFrom = 32 << 10
	// packing is what the header Content-Encoding says of a packed batch: the block format of Snappy.
	packing = "snappy"
)

// pack is text as it is stored, and its encoding, "" if it stays as it is. It may use memory, and what it returns may be in it.
func pack(memory, text []byte) (stored []byte, encoding string) {
	if len(text) < packFrom {
		return text, ""
	}
	if packed := s2.EncodeSnappy(memory[:cap(memory)], text); len(packed) < len(text) {
		return packed, packing
	}
	return text, ""
}

// maxText is more bytes than the text of any batch has.
const maxText = 2 * maxBatchBytes

// Text is a batch as it was before it was stored: unpacked if it is packed, else stored itself. It is not parsed: whether it is JSON shows then.
// What has more than 960 KiB, or is neither packed nor begins as JSON does, is an error.
func Text(stored []byte) ([]byte, error) {
	if len(stored) > 0 && stored[0] == '{' { // which no packed batch begins with: it would have 123 bytes
		if len(stored) > maxText {
			return nil, fmt.Errorf("it has %d bytes", len(stored))
		}
		return stored, nil
	}
	n, err := s2.DecodedLen(stored)
	switch {
	case err != nil:
		return nil, fmt.Errorf("it is neither JSON nor packed: %w", err)
	case n > maxText:
		return nil, fmt.Errorf("it is not JSON, and unpacked it would have %d bytes", n)
	}
	text, err := s2.Decode(nil, stored)
	if err != nil {
		return nil, fmt.Errorf("unpack it: %w", err)
	}
	if len(text) == 0 || text[0] != '{' {
		return nil, errors.New("what is packed is not JSON")
	}
	return text, nil
}
