package schemas

import (
	"crypto/hkdf"
	"crypto/sha256"
)

// enrolKeyInfo separates the proof key from any other use of a token.
const enrolKeyInfo = "runbus/enrol/1"

// EnrolmentKey is the key that both sides of an enrolment prove to hold: HKDF-SHA256 of the ticket's token with the runner's
// id as salt. The token's SHA-256, which is stored, doesn't give it away.
func EnrolmentKey(token [32]byte, runnerID string) [32]byte {
	key, err := hkdf.Key(sha256.New, token[:], []byte(runnerID), enrolKeyInfo, 32)
	if err != nil { // only for a length beyond 255 hashes
		panic("schemas: derive the enrolment key: " + err.Error())
	}
	return [32]byte(key)
}
