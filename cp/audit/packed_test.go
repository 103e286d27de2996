package audit

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"github.com/klauspost/compress/s2"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
)

// batchOf is the text of a first batch with so many events.
func batchOf(t testing.TB, events int) []byte {
	t.Helper()
	var all [][]byte
	for i := range events {
		e, err := encodeEvent(event("acme", strconv.Itoa(i)), now())
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, e)
	}
	text, err := chain{}.append(nil, "one", all)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// Many events are stored packed, few as JSON, and both are read back; the chain holds over them, and over large ones that an earlier version
// stored as JSON.
func TestPacked(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	nc := b.Conn(t, embedded.UserSec)
	s := openStore(t, b, nc)
	old := batchOf(t, 300)
	if len(old) < packFrom {
		t.Fatalf("%d bytes are no large batch", len(old))
	}
	if _, err := s.AppendAudit(ctx, old, "", 0); err != nil {
		t.Fatal(err)
	}
	l := newLog(t, b, s, "one")
	const many = 200
	for i := range many {
		l.Note(event("acme", "many-"+strconv.Itoa(i)))
	}
	run(t, l)() // writes what is pending, at once
	l = newLog(t, b, s, "two")
	l.Note(event("acme", "alone"))
	run(t, l)()
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	st, err := js.Stream(ctx, "RUNBUS_AUDIT")
	if err != nil {
		t.Fatal(err)
	}
	for seq, encoding := range []string{"", packing, ""} {
		m, err := st.GetMsg(ctx, uint64(seq)+1)
		if err != nil {
			t.Fatal(err)
		}
		if got := m.Header.Get("Content-Encoding"); got != encoding {
			t.Errorf("message %d has encoding %q, not %q", m.Sequence, got, encoding)
		}
		if packed := m.Data[0] != '{'; packed != (encoding != "") {
			t.Errorf("message %d, of encoding %q, begins with %q", m.Sequence, encoding, m.Data[:1])
		}
	}
	if n, err := l.Verify(ctx); n != 3 || err != nil {
		t.Errorf("%d batches hold: %v", n, err)
	}
	events, err := l.List(ctx, "acme", 1000)
	if err != nil || len(events) != 300+many+1 {
		t.Fatalf("%d events: %v", len(events), err)
	}
	for i := range many {
		if got, want := events[300+i].GetSubject(), "many-"+strconv.Itoa(i); got != want {
			t.Fatalf("%s where %s was noted", got, want)
		}
	}
	if again := newLog(t, b, s, "three"); again.head != l.head {
		t.Errorf("a new log begins at %v, not at %v", again.head, l.head)
	}
}

// The chain is over the bytes as they are stored: a batch that says the same in other bytes does not stand in its place.
func TestPackedTampering(t *testing.T) {
	text := batchOf(t, 200)
	stored, encoding := pack(nil, text)
	if encoding != packing || len(stored) > len(text)/3 {
		t.Fatalf("%d bytes of %d, as %q", len(stored), len(text), encoding)
	}
	head := chain{}
	if _, err := head.next(1, stored); err != nil {
		t.Fatal(err)
	}
	e, err := encodeEvent(event("acme", "next"), now())
	if err != nil {
		t.Fatal(err)
	}
	second, err := head.append(nil, "one", [][]byte{e})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := head.next(2, second); err != nil {
		t.Fatal(err)
	}
	for what, other := range map[string][]byte{"unpacked": text, "packed otherwise": s2.EncodeSnappyBetter(nil, text)} {
		c := chain{}
		batch, err := c.next(1, other)
		if err != nil || len(batch.GetEvents()) != 200 {
			t.Fatalf("%s it is no batch: %v", what, err)
		}
		var broken *BrokenError
		if _, err := c.next(2, second); !errors.As(err, &broken) || broken.Number != 2 {
			t.Errorf("%s it stands in the chain: %v", what, err)
		}
	}
}

// What is not worth it stays as it is, and what is packed tells how large it is before memory is taken for it.
func TestText(t *testing.T) {
	random := make([]byte, packFrom)
	for i := range random {
		random[i] = byte(rand.Uint32())
	}
	for what, text := range map[string][]byte{"small": batchOf(t, 3), "what does not shrink": random} {
		if stored, encoding := pack(nil, text); encoding != "" || !bytes.Equal(stored, text) {
			t.Errorf("%s is packed as %q", what, encoding)
		}
	}
	text := batchOf(t, 200)
	memory := make([]byte, 0, s2.MaxEncodedLen(len(text)))
	stored, _ := pack(memory, text)
	if &stored[0] != &memory[:1][0] {
		t.Error("the memory is not used again")
	}
	if got, err := Text(stored); err != nil || !bytes.Equal(got, text) {
		t.Errorf("unpacked otherwise: %v", err)
	}
	if got, err := Text(text); err != nil || !bytes.Equal(got, text) {
		t.Errorf("what is not packed: %v", err)
	}
	for what, stored := range map[string][]byte{
		"nothing": nil, "a word": []byte("hello"), "no JSON": s2.EncodeSnappy(nil, bytes.Repeat([]byte("x"), packFrom)),
		"a bomb": s2.EncodeSnappy(nil, []byte("{"+strings.Repeat(" ", maxText))), "more than there is": {0xff, 0xff, 0x3f, 0}, "2^32": {0xff, 0xff, 0xff, 0xff, 0x0f},
		"too much JSON": []byte("{" + strings.Repeat(" ", maxText)), "half": stored[:len(stored)/2],
	} {
		if got, err := Text(stored); err == nil {
			t.Errorf("%s is a batch of %d bytes", what, len(got))
		}
		var c chain
		var broken *BrokenError
		if _, err := c.next(1, stored); !errors.As(err, &broken) {
			t.Errorf("%s in the chain: %v", what, err)
		}
	}
}
