package schemas

import (
	"crypto/sha256"
	"encoding/binary"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// HelloSigningInput is what a runner signs with its nkey in RunnerHello.signature: tenant, runner, process nonce and
// sealing key, each with its length in front, under a label of its own. The control plane verifies it before it seals
// anything to that key, so that somebody who terminates TLS in between can't put another key in its place.
func HelloSigningInput(ref RunnerRef, h *runbusv1.RunnerHello) []byte {
	sum := sha256.New()
	for _, part := range [][]byte{
		[]byte("runbus/hello/1"), []byte(ref.Tenant), []byte(ref.Runner),
		[]byte(h.GetProcessNonce()), h.GetSealingKey(),
	} {
		var n [8]byte
		binary.BigEndian.PutUint64(n[:], uint64(len(part)))
		sum.Write(n[:])
		sum.Write(part)
	}
	return sum.Sum(nil)
}
