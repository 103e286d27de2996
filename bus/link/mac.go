package link

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"fmt"
)

// Binding ties the proofs of an enrolment to one TLS connection between two certificates (SPEC C5): whoever stands in between with
// connections of its own to both sides has other certificates and other keying material, and can't pass a proof on.
type Binding struct {
	runnerID string
	leaves   [2][sha256.Size]byte // SHA-256 of the control plane's leaf and of the runner's
	exporter []byte
}

// Bind makes the Binding of an established connection. Both leaves are DER: the exporter does not cover the client's certificate.
func Bind(cs tls.ConnectionState, runnerID string, controlPlaneLeaf, runnerLeaf []byte) (Binding, error) {
	exporter, err := cs.ExportKeyingMaterial(ProtoEnrol, nil, 32)
	if err != nil {
		return Binding{}, fmt.Errorf("export keying material: %w", err)
	}
	return Binding{
		runnerID: runnerID, exporter: exporter,
		leaves: [2][sha256.Size]byte{sha256.Sum256(controlPlaneLeaf), sha256.Sum256(runnerLeaf)},
	}, nil
}

// RunnerMAC proves that the runner holds key and asks for a certificate for the key of this request.
func (b Binding) RunnerMAC(key [32]byte, csrDER []byte) []byte {
	csr := sha256.Sum256(csrDER)
	return b.mac(key, "runbus/enrol/1 runner", csr[:])
}

// ControlPlaneMAC proves that the control plane holds key and issued this certificate in this tenant.
func (b Binding) ControlPlaneMAC(key [32]byte, certificatePEM []byte, tenant string) []byte {
	certificate := sha256.Sum256(certificatePEM)
	return b.mac(key, "runbus/enrol/1 control plane", certificate[:], []byte(tenant))
}

// mac is over each part with its length in front, so that no two lists of parts read the same.
func (b Binding) mac(key [32]byte, role string, more ...[]byte) []byte {
	h := hmac.New(sha256.New, key[:])
	for _, part := range append([][]byte{[]byte(role), []byte(b.runnerID), b.leaves[0][:], b.leaves[1][:], b.exporter}, more...) {
		var n [8]byte
		binary.BigEndian.PutUint64(n[:], uint64(len(part)))
		h.Write(n[:])
		h.Write(part)
	}
	return h.Sum(nil)
}
