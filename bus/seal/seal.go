// Package seal carries credentials to one runner for one dispatch: HPKE (RFC 9180) to the key that the runner's process
// made at its start and signed in its hello. The key lives in memory only, so what was sealed to an earlier process of the
// runner can't be opened by a later one (SPEC M2).
package seal

import (
	"crypto/hpke"
	"encoding/binary"
	"errors"

	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Suite is what SealedCredential.suite says, and the only suite there is: the hybrid of ML-KEM-768 and X25519, so that a
// recording is of no use to a quantum computer either.
const Suite = "MLKEM768-X25519/HKDF-SHA256/AES-256-GCM"

// label separates this use of HPKE from every other one.
const label = "runbus/seal/1"

func kem() hpke.KEM   { return hpke.MLKEM768X25519() }
func kdf() hpke.KDF   { return hpke.HKDFSHA256() }
func aead() hpke.AEAD { return hpke.AES256GCM() }

// Context is what a sealed credential is bound to. It opens only where all four are the same.
type Context struct{ Tenant, Runner, Session, Dispatch string }

// info is the context as HPKE info: the label and each field with its length in front, so that no two contexts share one.
func (c Context) info() []byte {
	var b []byte
	for _, part := range []string{label, c.Tenant, c.Runner, c.Session, c.Dispatch} {
		b = binary.BigEndian.AppendUint32(b, uint32(len(part)))
		b = append(b, part...)
	}
	return b
}

// Key is the private sealing key of one runner process. It is safe for concurrent use. There is no way to store it.
type Key struct {
	private hpke.PrivateKey
	public  []byte
}

// NewKey makes a key.
func NewKey() (*Key, error) {
	private, err := kem().GenerateKey()
	if err != nil {
		return nil, schemas.Wrap(schemas.CodeFailed, err, "the sealing key can't be made")
	}
	return &Key{private: private, public: private.PublicKey().Bytes()}, nil
}

// Public is the public key as it goes into RunnerHello.sealing_key. The caller may keep and change the slice.
func (k *Key) Public() []byte { return append([]byte(nil), k.public...) }

// String keeps the key out of logs.
func (k *Key) String() string { return "sealing key" }

// GoString keeps the key out of %#v.
func (k *Key) GoString() string { return k.String() }

// Seal encrypts b to the public key of a runner for one context. Every field of the context must be set. A public key that
// is none is an error of CodeInvalid. The encoded plaintext is overwritten before Seal returns; b itself is the caller's.
func Seal(public []byte, c Context, b *runbusv1.CredentialBundle) (*runbusv1.SealedCredential, error) {
	if err := c.valid(); err != nil {
		return nil, err
	}
	to, err := kem().NewPublicKey(public)
	if err != nil {
		return nil, schemas.Wrap(schemas.CodeInvalid, err, "the runner's sealing key is not valid")
	}
	encapsulated, sender, err := hpke.NewSender(to, kdf(), aead(), c.info())
	if err != nil {
		return nil, schemas.Wrap(schemas.CodeFailed, err, "the credentials can't be sealed")
	}
	// The exact size up front: an append that grows would leave copies behind that nobody overwrites.
	plain, err := proto.MarshalOptions{}.MarshalAppend(make([]byte, 0, proto.Size(b)), b)
	defer func() { clear(plain[:cap(plain)]) }()
	if err != nil {
		// Not wrapped: an encoding error (invalid UTF-8) may show what it could not encode.
		return nil, schemas.Errorf(schemas.CodeInvalid, "the credentials can't be encoded")
	}
	ciphertext, err := sender.Seal(nil, plain)
	if err != nil {
		return nil, schemas.Wrap(schemas.CodeFailed, err, "the credentials can't be sealed")
	}
	return &runbusv1.SealedCredential{Suite: Suite, EncapsulatedKey: encapsulated, Ciphertext: ciphertext}, nil
}

// errOpen is the one error for everything that does not open: it tells nothing of the content and not which part was wrong.
var errOpen = errors.New("made for another key, another dispatch, or damaged")

// Open decrypts what Seal made for this key and this context; everything else is an error of CodeInvalid. The decrypted
// bytes are overwritten before Open returns; the strings of the bundle are the caller's and can't be.
func (k *Key) Open(c Context, s *runbusv1.SealedCredential) (*runbusv1.CredentialBundle, error) {
	if err := c.valid(); err != nil {
		return nil, err
	}
	if s.GetSuite() != Suite {
		return nil, schemas.Errorf(schemas.CodeInvalid, "the credentials are not sealed with %s", Suite)
	}
	refused := schemas.Wrap(schemas.CodeInvalid, errOpen, "the sealed credentials don't open for this dispatch")
	recipient, err := hpke.NewRecipient(s.GetEncapsulatedKey(), k.private, kdf(), aead(), c.info())
	if err != nil {
		return nil, refused
	}
	plain, err := recipient.Open(nil, s.GetCiphertext())
	if err != nil {
		return nil, refused
	}
	defer clear(plain)
	bundle := &runbusv1.CredentialBundle{}
	if err := proto.Unmarshal(plain, bundle); err != nil {
		return nil, refused
	}
	return bundle, nil
}

func (c Context) valid() error {
	if c.Tenant == "" || c.Runner == "" || c.Session == "" || c.Dispatch == "" {
		return schemas.Errorf(schemas.CodeInvalid, "a sealing context needs tenant, runner, session and dispatch")
	}
	return nil
}
