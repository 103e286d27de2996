package canary

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/s2"
)

const inPieces = "c4nary-of-a-packed-batch"

// batch is the text of a batch in which a secret stands, in front of which there are its pieces.
func batch(secret string) []byte {
	var events []string
	for i := range 100 {
		events = append(events, fmt.Sprintf(`{"subject":"%s %d %s"}`, secret[:len(secret)/2], i, secret[len(secret)/2:]))
	}
	return []byte(`{"number":"1","events":[` + strings.Join(events, ",") + `,{"subject":"` + secret + `"}]}`)
}

// record is a message as JetStream stores it.
func record(subject, header string, message []byte) []byte {
	b := make([]byte, 20, 100)
	size := 20 + 2 + len(subject) + len(message) + 8
	if header != "" {
		size += 4 + len(header)
	}
	b = append(binary.LittleEndian.AppendUint16(b, uint16(len(subject))), subject...)
	binary.LittleEndian.PutUint32(b, uint32(size))
	if header != "" {
		b[3] |= 0x80
		b = append(binary.LittleEndian.AppendUint32(b, uint32(len(header))), header...)
	}
	return append(append(b, message...), "checksum"...)
}

const snappy = "NATS/1.0\r\nNats-Expected-Last-Sequence: 0\r\nContent-Encoding: snappy\r\n\r\n"

// A secret in a packed batch is found, among records of all kinds, whatever the parts in which they come; without unpacking it is not.
func TestPacked(t *testing.T) {
	s := New()
	s.Add("secret", "a test", []byte(inPieces), Text)
	packed := record("runbus.audit", snappy, s2.EncodeSnappy(nil, batch(inPieces)))
	if hits := s.Find(packed, nil); len(hits) > 0 {
		t.Fatalf("it can be found as it is: %v", hits)
	}
	noise := slices.Concat(
		record("runbus.audit", "", []byte(`{"number":"1"}`)), record("runbus.audit", "NATS/1.0\r\n\r\n", []byte(`{"number":"2"}`)), record("runbus.trace", "", make([]byte, 3*overlap)),
		record("runbus.audit", snappy, []byte("not packed")), []byte("\x0c\x00runbus.audit"),
	)
	begun := record("runbus.audit", snappy, make([]byte, 1<<19))[:100] // of which the rest was never written
	for what, stream := range map[string][]byte{
		"alone": packed, "behind others": slices.Concat(noise, packed), "before others": slices.Concat(packed, noise), "behind one that is cut": slices.Concat(begun, packed),
		"in the middle": slices.Concat(noise, begun, packed, noise),
	} {
		for _, part := range []int{1, 7, 1000, 1 << 20} {
			w := s.NewWriter(nil)
			for p := range slices.Chunk(stream, part) {
				_, _ = w.Write(p)
			}
			if hits := w.Hits(); len(hits) != 1 || hits[0].Kind != "secret" || hits[0].Form != "packed, as it is" {
				t.Errorf("%s, in parts of %d: %v", what, part, hits)
			}
		}
	}
	w := s.NewWriter(func(Secret) bool { return true })
	_, _ = w.Write(packed)
	if hits := w.Hits(); len(hits) > 0 {
		t.Errorf("found where it may be: %v", hits)
	}
}

// What is no packed message of the audit is left out, and takes no memory.
func TestNotPacked(t *testing.T) {
	good := s2.EncodeSnappy(nil, batch(inPieces))
	with := func(change func(b []byte)) []byte {
		b := record("runbus.audit", snappy, good)
		change(b)
		return b
	}
	for what, b := range map[string][]byte{
		"no header":         with(func(b []byte) { b[3] &^= 0x80 }),
		"a small length":    with(func(b []byte) { binary.LittleEndian.PutUint32(b, hasHeader|uint32(toHeader)) }),
		"no length":         with(func(b []byte) { binary.LittleEndian.PutUint32(b, hasHeader) }),
		"a large length":    with(func(b []byte) { binary.LittleEndian.PutUint32(b, hasHeader|mostPacked+1) }),
		"a large header":    with(func(b []byte) { binary.LittleEndian.PutUint32(b[toHeader-4:], 1<<31) }),
		"another encoding":  record("runbus.audit", strings.Replace(snappy, "snappy", "zstd", 1), good),
		"another subject":   record("runbus.event", snappy, good),
		"a damaged message": record("runbus.audit", snappy, good[:len(good)-1]),
		"a bomb":            record("runbus.audit", snappy, s2.EncodeSnappy(nil, make([]byte, mostPacked+1))),
		"an empty message":  record("runbus.audit", snappy, nil),
	} {
		var u unpacker
		u.take(b, false, func(text []byte) { t.Errorf("%s: %d bytes are unpacked", what, len(text)) })
		if len(u.held) > toHeader {
			t.Errorf("%s: %d bytes are held, as if more were to come", what, len(u.held))
		}
	}
	if text, cut := unpack(record("runbus.audit", snappy, good)); cut || !bytes.Equal(text, batch(inPieces)) {
		t.Error("one without any damage is not unpacked")
	}
}

// Whatever the bytes, they are looked through, in parts as in one piece, and little is held.
func FuzzUnpack(f *testing.F) {
	packed := record("runbus.audit", snappy, s2.EncodeSnappy(nil, batch(inPieces)))
	f.Add(packed, uint16(7))
	f.Add(slices.Concat([]byte("before"), packed[:50], packed, packed[:len(packed)-1]), uint16(1))
	f.Add(record("runbus.audit", "", []byte(`{}`)), uint16(100))
	f.Fuzz(func(t *testing.T, stream []byte, part uint16) {
		var whole, parts [][]byte
		var u, v unpacker
		u.take(stream, true, func(text []byte) { whole = append(whole, text) })
		for p := range slices.Chunk(stream, int(part)+1) {
			v.take(p, false, func(text []byte) { parts = append(parts, text) })
			if len(v.held) > mostPacked+len(p) {
				t.Fatalf("%d bytes are held", len(v.held))
			}
		}
		v.take(nil, true, func(text []byte) { parts = append(parts, text) })
		if !slices.EqualFunc(whole, parts, bytes.Equal) {
			t.Fatalf("%d messages, and %d in parts of %d", len(whole), len(parts), int(part)+1)
		}
		for _, text := range whole {
			if len(text) > mostPacked {
				t.Fatalf("%d bytes of text", len(text))
			}
		}
	})
}
