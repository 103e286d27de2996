package auth

import (
	"bytes"
	"crypto/ed25519"
	"errors"
	"fmt"

	"github.com/nats-io/nkeys"
)

// issuer is a key pair that signs as the one of nkeys does, and keeps what that one computes anew from its seed for each signature and
// for each look at its public key: two thirds of what signing the callout's answers costs. Safe for concurrent use.
type issuer struct {
	nkeys.KeyPair
	public  string
	private ed25519.PrivateKey
}

func newIssuer(k nkeys.KeyPair) (*issuer, error) {
	public, err := k.PublicKey()
	if err != nil {
		return nil, fmt.Errorf("key of the issuer: %w", err)
	}
	seed, err := k.Seed()
	if err != nil {
		return nil, fmt.Errorf("key of the issuer: %w", err)
	}
	kind, raw, err := nkeys.DecodeSeed(seed)
	if err != nil || kind != nkeys.PrefixByteAccount || len(raw) != ed25519.SeedSize {
		return nil, errors.New("the key of the issuer is not an account's key")
	}
	private := ed25519.NewKeyFromSeed(raw)
	named, err := nkeys.Decode(nkeys.PrefixByteAccount, []byte(public))
	if err != nil || !bytes.Equal(named, private[ed25519.SeedSize:]) {
		return nil, errors.New("the key of the issuer does not belong to its name")
	}
	return &issuer{KeyPair: k, public: public, private: private}, nil
}

// PublicKey is the encoded public key.
func (i *issuer) PublicKey() (string, error) { return i.public, nil }

// Sign signs input.
func (i *issuer) Sign(input []byte) ([]byte, error) { return ed25519.Sign(i.private, input), nil }
