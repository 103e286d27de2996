package audit

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
)

type tampering struct {
	name   string
	bodies [][]byte
	at     uint64 // where it shows
}

// tamperings of a chain of five.
func tamperings(good [][]byte) []tampering {
	change := func(i int, from, to string) [][]byte {
		bodies := slices.Clone(good)
		bodies[i] = bytes.Replace(bodies[i], []byte(from), []byte(to), 1)
		return bodies
	}
	return []tampering{
		{"an event changed", change(1, "person:ada", "person:eve"), 3},
		{"an event of the first batch changed", change(0, "person:ada", "person:eve"), 2},
		{"white space changed", change(2, ",", ", "), 4},
		{"a writer changed", change(2, `"one"`, `"eno"`), 4},
		{"the last batch changed", change(4, "person:ada", "person:eve"), 5},
		{"the first removed", slices.Delete(slices.Clone(good), 0, 1), 1},
		{"one removed", slices.Delete(slices.Clone(good), 2, 3), 3},
		{"the last removed", good[:4], 5},
		{"all removed", nil, 1},
		{"one inserted", slices.Insert(slices.Clone(good), 2, good[1]), 3},
		{"a stranger inserted", slices.Insert(slices.Clone(good), 1, []byte(`{"number":"2","writer":"x"}`)), 2},
		{"something else inserted", slices.Insert(slices.Clone(good), 3, []byte("hello")), 4},
		{"one appended", append(slices.Clone(good), []byte(`{"number":"6","writer":"x"}`)), 6},
		{"two exchanged", [][]byte{good[0], good[2], good[1], good[3], good[4]}, 2},
		{"reversed", [][]byte{good[4], good[3], good[2], good[1], good[0]}, 1},
	}
}

func TestChain(t *testing.T) {
	c := chain{}
	var good [][]byte
	for range 5 {
		event, err := encodeEvent(Event("person:ada", "key.mint", "key:x", "ok", "a", "b"), now())
		if err != nil {
			t.Fatal(err)
		}
		body, err := c.append(nil, "one", [][]byte{event, event})
		if err != nil {
			t.Fatal(err)
		}
		good = append(good, body)
		c = after(c.number+1, body)
	}
	walk := func(bodies [][]byte) (chain, error) {
		c := chain{}
		for i, body := range bodies {
			if _, err := c.next(uint64(i)+1, body); err != nil {
				return c, err
			}
		}
		return c, nil
	}
	if end, err := walk(good); err != nil || end != c {
		t.Fatalf("the true chain: %v, %v", end, err)
	}
	for _, m := range tamperings(good) {
		end, err := walk(m.bodies)
		var broken *BrokenError
		switch {
		case errors.As(err, &broken):
			if broken.Number != m.at {
				t.Errorf("%s: %v", m.name, err)
			}
		case end == c:
			t.Errorf("%s is not noticed", m.name)
		}
	}
	var gap chain
	if _, err := gap.next(2, good[1]); err == nil {
		t.Error("a gap is not noticed")
	}
}

func FuzzDecodeBatch(f *testing.F) {
	event, err := encodeEvent(Event("operator", "a.b", "c", "ok", "k", "v"), now())
	if err != nil {
		f.Fatal(err)
	}
	body, err := chain{}.append(nil, "one", [][]byte{event})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(body)
	f.Add([]byte(`{"number":"1","events":[{"at":"2026-01-01T00:00:00Z"}]}`))
	f.Add([]byte(`{"number":1e3,"previous":null,"later":{"x":[1,2]}}`))
	f.Add([]byte("{"))
	packed, _ := pack(nil, batchOf(f, 200))
	f.Add(packed)
	f.Add(packed[:len(packed)/2])
	f.Add([]byte{0xff, 0xff, 0x3f, 0})
	f.Fuzz(func(t *testing.T, body []byte) {
		batch, err := decodeBatch(body)
		c := chain{}
		next, nextErr := c.next(1, body)
		if err != nil {
			if nextErr == nil {
				t.Fatal("what does not decode is accepted")
			}
			return
		}
		accepted := batch.GetNumber() == 1 && batch.GetPrevious() == ""
		if accepted != (nextErr == nil) {
			t.Fatalf("number %d, previous %q: %v", batch.GetNumber(), batch.GetPrevious(), nextErr)
		}
		if !accepted {
			if c != (chain{}) {
				t.Fatal("a refused batch moved the chain")
			}
			return
		}
		if !proto.Equal(batch, next) || c != after(1, body) {
			t.Fatalf("accepted otherwise than decoded")
		}
	})
}
