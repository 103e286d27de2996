package bus

import (
	"crypto/sha256"
	"hash"
	"sync"

	"github.com/zeebo/xxh3"
)

// digestHead is how much of a stream is under SHA-256, in bytes.
const digestHead = 1 << 20

// Digest is the checksum of a result's stream, which both ends compute of its chunks: SHA-256 over the first MiB; behind it XXH3-128 of
// each chunk, or what is left of it, seeded with both halves of the one before, exclusive or (the first with 0). It finds what a fault
// of ours damages; who means to change rows has TLS against him. SHA-256 over all of it took a quarter of the processor time of a large
// result (measured). The zero value is the checksum of nothing. It is for one goroutine at a time.
type Digest struct {
	// Whole has SHA-256 go over all of it, as runners did that know nothing else, and is to be set before the first Add.
	Whole bool

	head hash.Hash
	n    int64 // bytes in head
	rest xxh3.Uint128
	long bool // there is something behind the head
	sum  [sha256.Size]byte
	tail [16]byte
}

var heads = sync.Pool{New: func() any { return sha256.New() }}

// Add takes the next chunk in.
func (d *Digest) Add(b []byte) {
	if d.head == nil {
		d.head, _ = heads.Get().(hash.Hash)
	}
	if !d.Whole {
		left := min(digestHead-d.n, int64(len(b)))
		if behind := b[left:]; len(behind) > 0 {
			d.rest = xxh3.Hash128Seed(behind, d.rest.Hi^d.rest.Lo)
			d.long = true
		}
		b = b[:left]
	}
	d.n += int64(len(b))
	d.head.Write(b)
}

// SHA256 is the first part of the checksum. It is valid until the next Add.
func (d *Digest) SHA256() []byte {
	if d.head == nil {
		d.sum = sha256.Sum256(nil)
		return d.sum[:]
	}
	return d.head.Sum(d.sum[:0])
}

// XXH3 is the second part; nil if nothing is behind the first MiB, or under Whole. It is valid until the next Add.
func (d *Digest) XXH3() []byte {
	if !d.long {
		return nil
	}
	d.tail = d.rest.Bytes()
	return d.tail[:]
}

// Close gives memory back. Nothing may be called afterwards.
func (d *Digest) Close() {
	if d.head != nil {
		d.head.Reset()
		heads.Put(d.head)
		d.head = nil
	}
}
