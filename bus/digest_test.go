package bus

import (
	"bytes"
	"crypto/sha256"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func digestOf(whole bool, pieces ...[]byte) (head, rest []byte) {
	d := Digest{Whole: whole}
	defer d.Close()
	for _, p := range pieces {
		d.Add(p)
	}
	return bytes.Clone(d.SHA256()), bytes.Clone(d.XXH3())
}

// TestDigest: both ends have the same of the same chunks, and another as soon as a byte, their order or their number differs.
func TestDigest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var pieces [][]byte
		var stream []byte
		for i := range rapid.IntRange(0, 6).Draw(t, "pieces") {
			piece := bytes.Repeat([]byte{byte(i + 1)}, rapid.SampledFrom([]int{1, 1000, digestHead / 2, digestHead, digestHead + 1}).Draw(t, "size"))
			pieces, stream = append(pieces, piece), append(stream, piece...)
		}
		head, rest := digestOf(false, pieces...)
		if want := sha256.Sum256(stream[:min(len(stream), digestHead)]); !bytes.Equal(head, want[:]) {
			t.Fatal("another SHA-256 of the first MiB")
		}
		if (rest != nil) != (len(stream) > digestHead) {
			t.Fatalf("a stream of %d bytes has %x", len(stream), rest)
		}
		if all, none := digestOf(true, pieces...); none != nil || sha256.Sum256(stream) != [32]byte(all) {
			t.Fatal("another SHA-256 of the whole")
		}
		if len(pieces) == 0 {
			return
		}
		differs := func(what string, others ...[]byte) {
			if h, r := digestOf(false, others...); bytes.Equal(h, head) && bytes.Equal(r, rest) {
				t.Fatalf("%s: the same checksum", what)
			}
		}
		at := rapid.IntRange(0, len(pieces)-1).Draw(t, "at")
		damaged := slices.Clone(pieces)
		damaged[at] = bytes.Clone(damaged[at])
		damaged[at][rapid.IntRange(0, len(damaged[at])-1).Draw(t, "byte")] ^= 1
		differs("a byte", damaged...)
		differs("one is missing", slices.Delete(slices.Clone(pieces), at, at+1)...)
		differs("one comes twice", slices.Insert(slices.Clone(pieces), at, pieces[at])...)
		if other := (at + 1) % len(pieces); other != at {
			swapped := slices.Clone(pieces)
			swapped[at], swapped[other] = swapped[other], swapped[at]
			differs("two are swapped", swapped...)
		}
	})
}
