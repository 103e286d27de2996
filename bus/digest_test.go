package bus

import (
	"bytes"
	"crypto/sha256"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func digestOf(scheme Scheme, pieces ...[]byte) (head, rest []byte) {
	d := Digest{Scheme: scheme}
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
		head, rest := digestOf(SchemeHead, pieces...)
		if want := sha256.Sum256(stream[:min(len(stream), digestHead)]); !bytes.Equal(head, want[:]) {
			t.Fatal("another SHA-256 of the first MiB")
		}
		if (rest != nil) != (len(stream) > digestHead) {
			t.Fatalf("a stream of %d bytes has %x", len(stream), rest)
		}
		if all, none := digestOf(SchemeSHA256, pieces...); none != nil || sha256.Sum256(stream) != [32]byte(all) {
			t.Fatal("another SHA-256 of the whole")
		}
		none, fast := digestOf(SchemeXXH3, pieces...)
		if none != nil || len(fast) != 16 {
			t.Fatalf("under XXH3 alone: %x and %x", none, fast)
		}
		if len(pieces) == 0 {
			return
		}
		differs := func(what string, others ...[]byte) {
			if h, r := digestOf(SchemeHead, others...); bytes.Equal(h, head) && bytes.Equal(r, rest) {
				t.Fatalf("%s: the same checksum", what)
			}
			if _, f := digestOf(SchemeXXH3, others...); bytes.Equal(f, fast) {
				t.Fatalf("%s: the same XXH3", what)
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
