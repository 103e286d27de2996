package api

import (
	"encoding/binary"
	"fmt"

	"github.com/klauspost/compress/zstd"
)

// maxWindow is the largest window that a Zstandard frame may ask for, in bytes: what RFC 8878 wants every decoder to have, and eight times
// what a runner takes. Arrow's decoder would give 512 MiB, which are not the allocator's.
const maxWindow = 8 << 20

// codecZstd is the one codec that a batch may be compressed with: the decoder of LZ4 calls itself for each magic number of its old format
// that follows another, until the stack of the process ends, which no recover survives.
const codecZstd = 1

// checkWindows checks how much memory the buffers of a compressed batch, which are in body, ask the decoder for. That none is read twice
// bounds its time as well.
func (v *verifier) checkWindows(body []byte) error {
	left := uint64(len(body))
	for i := range v.packed {
		at := v.buffers + 16*i
		offset, length := binary.LittleEndian.Uint64(v.b[at:]), binary.LittleEndian.Uint64(v.b[at+8:])
		switch {
		case length == 0:
			continue
		case length < 8 || length > left || offset > uint64(len(body))-length:
			return fmt.Errorf("a compressed buffer of %d bytes at %d of %d, of which %d are left", length, offset, len(body), left)
		}
		left -= length
		buffer := body[offset : offset+length]
		if int64(binary.LittleEndian.Uint64(buffer)) == -1 { // it is as it was
			continue
		}
		if window := widest(buffer[8:]); window > maxWindow {
			return fmt.Errorf("a Zstandard window of %d bytes, over %d", window, maxWindow)
		}
	}
	return nil
}

// widest is the largest window that any of these Zstandard frames asks for, in bytes. It ends at what is none, as the decoder does.
func widest(b []byte) (window uint64) {
	for {
		var h zstd.Header
		if h.Decode(b) != nil {
			return window
		}
		b = b[h.HeaderSize:]
		rest := uint64(h.SkippableSize)
		if !h.Skippable {
			window = max(window, h.WindowSize)
			if h.SingleSegment {
				window = max(window, h.FrameContentSize)
			}
			var whole bool
			if b, whole = behindBlocks(b); !whole {
				return window
			}
			if h.HasCheckSum {
				rest = 4
			}
		}
		if rest > uint64(len(b)) {
			return window
		}
		b = b[rest:]
	}
}

// behindBlocks is what comes behind the last block of a frame, if that is there.
func behindBlocks(b []byte) (rest []byte, whole bool) {
	const rle, reserved = 1, 3 // kinds of a block
	for last := false; !last; {
		if len(b) < 3 {
			return nil, false
		}
		head := uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16
		last = head&1 != 0
		size := int(head >> 3)
		switch head >> 1 & 3 {
		case rle:
			size = 1
		case reserved:
			return nil, false
		}
		if b = b[3:]; size > len(b) {
			return nil, false
		}
		b = b[size:]
	}
	return b, true
}
