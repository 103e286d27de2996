package schemas

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"encoding/binary"
	"strings"

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

// leafKeyPrefix is what RunnerHello.public_key begins with for a dialled runner: the hex SHA-256 of its leaf follows.
const leafKeyPrefix = "leaf:"

// LeafKey is RunnerHello.public_key of a dialled runner with a leaf of this fingerprint.
func LeafKey(fingerprint string) string { return leafKeyPrefix + fingerprint }

// LeafFingerprint reads a LeafKey.
func LeafFingerprint(publicKey string) (fingerprint string, ok bool) {
	return strings.CutPrefix(publicKey, leafKeyPrefix)
}

// SignHello signs a HelloSigningInput with the private key of a leaf, ECDSA or Ed25519.
func SignHello(key crypto.Signer, input []byte) ([]byte, error) {
	if _, ok := key.Public().(ed25519.PublicKey); ok {
		return key.Sign(nil, input, crypto.Hash(0))
	}
	sum := sha256.Sum256(input)
	return key.Sign(rand.Reader, sum[:], crypto.SHA256)
}

// VerifyHello reports whether signature is SignHello's by the key whose SubjectPublicKeyInfo (DER) is spki.
func VerifyHello(spki, input, signature []byte) bool {
	public, err := x509.ParsePKIXPublicKey(spki)
	if err != nil {
		return false
	}
	switch key := public.(type) {
	case *ecdsa.PublicKey:
		sum := sha256.Sum256(input)
		return ecdsa.VerifyASN1(key, sum[:], signature)
	case ed25519.PublicKey:
		return ed25519.Verify(key, input, signature)
	}
	return false
}
