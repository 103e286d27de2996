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
		for _, scheme := range []bus.Scheme{bus.SchemeHead, bus.SchemeXXH3} {
			relayed := &bus.Digest{Scheme: scheme}
			for piece := range slices.Chunk(stream[:size], bus.ChunkBytes) {
				relayed.Add(piece)
			}
			sum, rest := bytes.Clone(relayed.SHA256()), bytes.Clone(relayed.XXH3())
			check := func(what string, want bool, sum, rest []byte) {
				t.Helper()
				if intact(relayed, &runbusv1.RunnerWorkResult{StreamSha256: sum, RestXxh3: rest}) != want {
					t.Errorf("%d bytes under scheme %d: %s: intact is %v", size, scheme, what, !want)
				}
			}
			other := bytes.Repeat([]byte{1}, 32)
			check("the same checksum", true, sum, rest)
			check("another SHA-256", false, other, rest)
			check("another XXH3", false, sum, other[:16])
			switch {
			case scheme == bus.SchemeXXH3:
				check("no checksum", false, nil, nil)
				check("that of a runner that was asked for another", false, whole[:], nil)
			case size == len(stream):
				check("that of a runner that knows no XXH3", true, whole[:], nil)
			}
			relayed.Close()
		}
	}
}
