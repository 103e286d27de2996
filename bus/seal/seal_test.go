package seal_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus/seal"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

var where = seal.Context{Tenant: "acme", Runner: "edge.1", Session: "5e55", Dispatch: "01D"}

const secret = "correct horse battery staple"

func bundle() *runbusv1.CredentialBundle {
	return &runbusv1.CredentialBundle{
		Secrets: map[string]string{"password": secret},
		Caller:  &runbusv1.CallerSession{Tenant: "acme", Person: "ada", Role: "WRITER"},
	}
}

func newKey(t testing.TB) *seal.Key {
	t.Helper()
	k, err := seal.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func sealed(t testing.TB, k *seal.Key) *runbusv1.SealedCredential {
	t.Helper()
	s, err := seal.Seal(k.Public(), where, bundle())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestOpensForItsDispatch(t *testing.T) {
	k := newKey(t)
	s := sealed(t, k)
	if bytes.Contains(s.GetCiphertext(), []byte(secret)) {
		t.Fatal("the ciphertext shows the secret")
	}
	got, err := k.Open(where, s)
	if err != nil || !proto.Equal(got, bundle()) {
		t.Fatalf("opened %v, %v", got, err)
	}
	if again := sealed(t, k); bytes.Equal(again.GetCiphertext(), s.GetCiphertext()) {
		t.Fatal("two seals of the same are the same")
	}
}

func TestOpensNowhereElse(t *testing.T) {
	k := newKey(t)
	elsewhere := map[string]seal.Context{
		"tenant":   {"acmf", where.Runner, where.Session, where.Dispatch},
		"runner":   {where.Tenant, "edge.2", where.Session, where.Dispatch},
		"session":  {where.Tenant, where.Runner, "5e56", where.Dispatch},
		"dispatch": {where.Tenant, where.Runner, where.Session, "01E"},
		"shifted":  {where.Tenant + where.Runner[:1], where.Runner[1:], where.Session, where.Dispatch},
		"swapped":  {where.Runner, where.Tenant, where.Session, where.Dispatch},
	}
	for name, c := range elsewhere {
		t.Run(name, func(t *testing.T) { mustRefuse(t, k, c, sealed(t, k)) })
	}
	t.Run("key of a later process", func(t *testing.T) { mustRefuse(t, newKey(t), where, sealed(t, k)) })
	t.Run("suite", func(t *testing.T) {
		s := sealed(t, k)
		s.Suite = "X25519/HKDF-SHA256/AES-256-GCM"
		mustRefuse(t, k, where, s)
	})
	t.Run("every byte counts", func(t *testing.T) {
		s := sealed(t, k)
		for _, b := range [][]byte{s.GetCiphertext(), s.GetEncapsulatedKey()} {
			for i := range b {
				b[i] ^= 0x40
				mustRefuse(t, k, where, s)
				b[i] ^= 0x40
			}
		}
		if _, err := k.Open(where, s); err != nil {
			t.Fatalf("put back, it does not open: %v", err)
		}
	})
	t.Run("nothing", func(t *testing.T) { mustRefuse(t, k, where, nil) })
}

func mustRefuse(t testing.TB, k *seal.Key, c seal.Context, s *runbusv1.SealedCredential) {
	t.Helper()
	got, err := k.Open(c, s)
	if got != nil || schemas.CodeOf(err) != schemas.CodeInvalid {
		t.Fatalf("opened %v, error %v", got, err)
	}
	for e := err; e != nil; e = errors.Unwrap(e) {
		if strings.Contains(e.Error(), secret) || strings.Contains(fmt.Sprintf("%#v", e), secret) {
			t.Fatalf("the error shows the secret: %v", e)
		}
	}
}

// A context or a key that is not whole is refused before anything is sealed to it, and a bundle that can't be encoded gives
// an error that does not show it.
func TestSealRefuses(t *testing.T) {
	k := newKey(t)
	whole := []string{where.Tenant, where.Runner, where.Session, where.Dispatch}
	for i := range whole {
		p := append([]string(nil), whole...)
		p[i] = ""
		c := seal.Context{Tenant: p[0], Runner: p[1], Session: p[2], Dispatch: p[3]}
		if _, err := seal.Seal(k.Public(), c, bundle()); schemas.CodeOf(err) != schemas.CodeInvalid {
			t.Errorf("sealed with %+v: %v", c, err)
		}
		mustRefuse(t, k, c, sealed(t, k))
	}
	for _, public := range [][]byte{nil, {1}, k.Public()[1:], make([]byte, len(k.Public())+1)} {
		if _, err := seal.Seal(public, where, bundle()); schemas.CodeOf(err) != schemas.CodeInvalid {
			t.Errorf("sealed to a key of %d bytes: %v", len(public), err)
		}
	}
	bad := &runbusv1.CredentialBundle{Secrets: map[string]string{"password": secret + "\xff"}}
	_, err := seal.Seal(k.Public(), where, bad)
	if schemas.CodeOf(err) != schemas.CodeInvalid {
		t.Fatalf("sealed text that is not UTF-8: %v", err)
	}
	for e := err; e != nil; e = errors.Unwrap(e) {
		if strings.Contains(e.Error(), secret) {
			t.Fatalf("the error shows the secret: %v", e)
		}
	}
}

// The key is nothing that a log could show.
func TestKeyIsSilent(t *testing.T) {
	k := newKey(t)
	for _, verb := range []string{"%v", "%+v", "%#v", "%s"} {
		if s := fmt.Sprintf(verb, k); s != "sealing key" {
			t.Errorf("%s shows %q", verb, s)
		}
	}
	p := k.Public()
	p[0] ^= 1
	if bytes.Equal(p, k.Public()) {
		t.Error("Public hands out the key's own slice")
	}
}

// Nothing that somebody else made opens, and nothing makes Open panic.
func FuzzOpen(f *testing.F) {
	k := newKey(f)
	s := sealed(f, k)
	f.Add(s.GetSuite(), s.GetEncapsulatedKey(), s.GetCiphertext()[1:])
	f.Add(seal.Suite, []byte{}, []byte{})
	f.Add("", s.GetEncapsulatedKey(), s.GetCiphertext())
	f.Fuzz(func(t *testing.T, suite string, encapsulated, ciphertext []byte) {
		mustRefuse(t, k, where, &runbusv1.SealedCredential{Suite: suite, EncapsulatedKey: encapsulated, Ciphertext: ciphertext})
	})
}
