package canary

import (
	"bytes"
	"encoding/binary"

	"github.com/klauspost/compress/s2"
)

// The files of JetStream's streams are records: length (4 bytes, little endian, the highest bit set if there is a header), sequence (8),
// time (8), length of the subject (2), subject, [length of the header (4), header,] message, checksum (8).
const (
	toSubjectLength = 20
	checksum        = 8
	hasHeader       = 1 << 31
	// packedRecord is what stands in a record of the audit from the length of its subject on.
	packedRecord = "\x0c\x00runbus.audit"
	toHeader     = toSubjectLength + len(packedRecord) + 4
	// packedBy is the line in the header of a message of the audit that cp/audit has packed: a block of Snappy.
	packedBy = "\r\nContent-Encoding: snappy\r\n"
	// mostPacked bounds a record, and what is unpacked of it: both are smaller by half at least.
	mostPacked = 1 << 20
)

// unpacker finds packed messages of the audit among the records in a stream of any length, whatever else is in it. It holds little more than
// one record. The zero value is ready.
type unpacker struct {
	held   []byte // what a record may still begin in
	looked int    // how much of held was looked through for packedRecord
}

// take gives each the text of all packed messages that end in p, the next part of the stream. last says that no part follows.
func (u *unpacker) take(p []byte, last bool, each func(text []byte)) {
	u.held = append(u.held, p...)
	for {
		i := bytes.Index(u.held[u.looked:], []byte(packedRecord))
		if i < 0 {
			u.looked = max(u.looked, len(u.held)-len(packedRecord)+1)
			break
		}
		if begin := u.looked + i - toSubjectLength; begin >= 0 {
			text, cut := unpack(u.held[begin:])
			if cut && !last {
				u.looked += i
				break
			}
			if text != nil {
				each(text)
			}
		}
		u.looked += i + 1 // what was no record after all hides none that begins in it
	}
	done := max(0, u.looked-toSubjectLength)
	u.held = append(u.held[:0], u.held[done:]...)
	u.looked -= done
}

// unpack is the text of the packed message that the record at the beginning of b holds, nil if it is none. cut says that b ends before that
// can be told.
func unpack(b []byte) (text []byte, cut bool) {
	size := binary.LittleEndian.Uint32(b)
	if size&hasHeader == 0 {
		return nil, false
	}
	size &^= hasHeader
	if size < uint32(toHeader+checksum) || size > mostPacked {
		return nil, false
	}
	if uint32(len(b)) < size {
		return nil, true
	}
	message := b[toHeader : size-checksum]
	header := binary.LittleEndian.Uint32(b[toHeader-4:])
	if header > uint32(len(message)) || !bytes.Contains(message[:header], []byte(packedBy)) {
		return nil, false
	}
	packed := message[header:]
	if n, err := s2.DecodedLen(packed); err != nil || n > mostPacked {
		return nil, false
	}
	text, err := s2.Decode(nil, packed)
	if err != nil {
		return nil, false
	}
	return text, false
}
