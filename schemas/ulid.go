package schemas

import (
	"crypto/rand"
	"sync"
	"time"

	"github.com/oklog/ulid/v2"
)

// entropy is random bytes in stock, since the ids of dispatches and events are drawn at every dispatch.
var entropy struct {
	sync.Mutex
	bytes [1000]byte
	left  int
}

// NewULID is a ULID of this time with 80 random bits: ids of dispatches and of events. Safe for concurrent use. A time outside
// what a ULID can say counts as its first or last millisecond.
func NewULID(at time.Time) string {
	var text [ulid.EncodedSize]byte
	return string(AppendULID(text[:0], at))
}

// AppendULID appends what NewULID returns.
func AppendULID(b []byte, at time.Time) []byte {
	var id ulid.ULID
	ms := uint64(max(at.UnixMilli(), 0))
	_ = id.SetTime(min(ms, ulid.MaxTime())) // within its bounds
	entropy.Lock()
	if entropy.left < 10 {
		_, _ = rand.Read(entropy.bytes[:]) // does not fail
		entropy.left = len(entropy.bytes)
	}
	copy(id[6:], entropy.bytes[entropy.left-10:entropy.left])
	entropy.left -= 10
	entropy.Unlock()
	var text [ulid.EncodedSize]byte
	_ = id.MarshalTextTo(text[:]) // has the room
	return append(b, text[:]...)
}
