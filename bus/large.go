package bus

import "sync"

// largeMemory is what a frame with a large chunk is kept in. Frames take turns with it: made anew for each it was a tenth of what a result of
// 1 GiB costs the runner, most of it the clearing (measured).
type largeMemory [entryRoom + frameRoom + ChunkBytes]byte

var largeMemories = sync.Pool{New: func() any { return new(largeMemory) }}

// largeFrom is from how many bytes of a chunk on its frame is kept in a largeMemory.
const largeFrom = ChunkBytes / 2

// roomFor is memory for a frame with a chunk of n bytes, and whether it is one that frames take turns with.
func roomFor(n int64) ([]byte, *largeMemory) {
	if n < largeFrom || n > ChunkBytes {
		return make([]byte, entryRoom+frameRoom+n), nil
	}
	large, _ := largeMemories.Get().(*largeMemory)
	return large[:], large
}

// giveBack lets other frames have the memory of frame seq, which is in the outbox no more, unless it is being published: then it is left to the
// collector. It reports whether it did.
func (o *outbox) giveBack(f outFrame, seq uint64) bool {
	if f.large == nil || seq == o.publishing {
		return false
	}
	largeMemories.Put(f.large)
	return true
}
