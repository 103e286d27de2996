package dispatch

import (
	"bytes"
	"crypto/sha256"
	"slices"
	"testing"

	"github.com/org-runink/runbus/bus"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

func TestIntact(t *testing.T) {
	stream := bytes.Repeat([]byte("runbus"), 400_000)
	whole := sha256.Sum256(stream)
	for _, size := range []int{0, 10, len(stream)} {
		relayed := &bus.Digest{}
		for piece := range slices.Chunk(stream[:size], bus.ChunkBytes) {
			relayed.Add(piece)
		}
		sum := bytes.Clone(relayed.SHA256())
		rest := bytes.Clone(relayed.XXH3())
		if !intact(relayed, sum, &runbusv1.RunnerWorkResult{StreamSha256: sum, RestXxh3: rest}) {
			t.Errorf("%d bytes: the same checksum is refused", size)
		}
		other := bytes.Repeat([]byte{1}, 32)
		if intact(relayed, sum, &runbusv1.RunnerWorkResult{StreamSha256: other, RestXxh3: rest}) {
			t.Errorf("%d bytes: another SHA-256 is taken", size)
		}
		if intact(relayed, sum, &runbusv1.RunnerWorkResult{StreamSha256: sum, RestXxh3: other[:16]}) {
			t.Errorf("%d bytes: another XXH3 is taken", size)
		}
		if size == len(stream) && !intact(relayed, sum, &runbusv1.RunnerWorkResult{StreamSha256: whole[:]}) {
			t.Error("the checksum of a runner that knows no XXH3 is refused")
		}
		relayed.Close()
	}
}
