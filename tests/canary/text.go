package canary

import (
	"encoding/base64"
	"math/big"
)

func encoded(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

// decoded is what text, which was checked before, is base64url of.
func decoded(text []byte) []byte {
	b, err := base64.RawURLEncoding.DecodeString(string(text))
	if err != nil {
		return nil
	}
	return b
}

// decimal is a number as fmt prints the private part of a key.
func decimal(b []byte) string { return new(big.Int).SetBytes(b).String() }
