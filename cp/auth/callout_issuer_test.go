package auth

import (
	"testing"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nkeys"
)

// What the issuer signs is what its key pair signs, to the byte, and reads as the same issuer's.
func TestIssuerSignsAsItsKeyPair(t *testing.T) {
	pair, err := nkeys.CreateAccount()
	if err != nil {
		t.Fatal(err)
	}
	i, err := newIssuer(pair)
	if err != nil {
		t.Fatal(err)
	}
	want, err := pair.Sign([]byte("answer"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := i.Sign([]byte("answer")); err != nil || string(got) != string(want) {
		t.Errorf("signature %x, %v, want %x", got, err, want)
	}
	user, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	name, err := user.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	text, err := jwt.NewUserClaims(name).Encode(i)
	if err != nil {
		t.Fatal(err)
	}
	claims, err := jwt.DecodeUserClaims(text)
	if err != nil {
		t.Fatal(err)
	}
	if public, err := pair.PublicKey(); err != nil || claims.Issuer != public {
		t.Errorf("issuer %q, %v, want %q", claims.Issuer, err, public)
	}
	if _, err := newIssuer(user); err == nil {
		t.Error("the key of a user became an issuer")
	}
}
