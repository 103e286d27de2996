package auth

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"

	"github.com/nats-io/nkeys"
	"golang.org/x/crypto/nacl/box"
)

// boxes opens what servers sealed for the callout and seals what it answers, as nkeys.KeyPair of a curve key does. It keeps the key
// that it shares with each server: nkeys makes it anew for each message, which is a third of what an answer costs. Safe for
// concurrent use.
type boxes struct {
	private [32]byte

	mu     sync.RWMutex
	shared map[string]*[32]byte // by the server's public key
}

// mostShared bounds the servers that are remembered: each start of a server makes a new one.
const mostShared = 64

var boxVersion = []byte(nkeys.XKeyVersionV1)

const boxNonce = 24

func newBoxes(x nkeys.KeyPair) (*boxes, error) {
	seed, err := x.Seed()
	if err != nil {
		return nil, fmt.Errorf("key of the callout: %w", err)
	}
	kind, raw, err := nkeys.DecodeSeed(seed)
	if err != nil || kind != nkeys.PrefixByteCurve || len(raw) != 32 {
		return nil, errors.New("the key of the callout is not a curve key")
	}
	return &boxes{private: [32]byte(raw), shared: make(map[string]*[32]byte)}, nil
}

// with is the key that is shared with a server.
func (b *boxes) with(server string) (*[32]byte, error) {
	b.mu.RLock()
	key := b.shared[server]
	b.mu.RUnlock()
	if key != nil {
		return key, nil
	}
	raw, err := nkeys.Decode(nkeys.PrefixByteCurve, []byte(server))
	if err != nil || len(raw) != 32 {
		return nil, errors.New("not the public key of a server")
	}
	key = new([32]byte)
	box.Precompute(key, (*[32]byte)(raw), &b.private)
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.shared) >= mostShared {
		clear(b.shared)
	}
	b.shared[server] = key
	return key, nil
}

// open opens what server sealed.
func (b *boxes) open(sealed []byte, server string) ([]byte, error) {
	key, err := b.with(server)
	if err != nil {
		return nil, err
	}
	rest, ok := bytes.CutPrefix(sealed, boxVersion)
	if !ok || len(rest) <= boxNonce {
		return nil, errors.New("not sealed")
	}
	nonce := [boxNonce]byte(rest)
	plain, ok := box.OpenAfterPrecomputation(nil, rest[boxNonce:], &nonce, key)
	if !ok {
		return nil, errors.New("it does not open")
	}
	return plain, nil
}

// seal seals for server.
func (b *boxes) seal(plain []byte, server string) ([]byte, error) {
	key, err := b.with(server)
	if err != nil {
		return nil, err
	}
	var nonce [boxNonce]byte
	_, _ = rand.Read(nonce[:]) // does not fail
	out := append(bytes.Clone(boxVersion), nonce[:]...)
	return box.SealAfterPrecomputation(out, plain, &nonce, key), nil
}
