package auth

import (
	"encoding/base64"
	"errors"
	"fmt"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nkeys"
)

// requestAudience is the audience of every authorization request.
const requestAudience = "nats-authorization-request"

// openRequest opens and checks a server's request. Only sealed ones are taken.
func openRequest(x *boxes, serverXKey string, data []byte) (*jwt.AuthorizationRequestClaims, error) {
	if !nkeys.IsValidPublicCurveKey(serverXKey) {
		return nil, errors.New("the request names no key of the server")
	}
	plain, err := x.open(data, serverXKey)
	if err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	return parseRequest(plain, serverXKey)
}

// parseRequest reads a request: a JWT that the server signed with the key that is its id. Its expiry is not looked at,
// because that is the server's clock; the time of its coming in counts.
func parseRequest(plain []byte, serverXKey string) (*jwt.AuthorizationRequestClaims, error) {
	req, err := jwt.DecodeAuthorizationRequestClaims(string(plain))
	if err != nil {
		return nil, err
	}
	switch {
	case req.Audience != requestAudience:
		return nil, errors.New("not meant for a callout")
	case req.Server.ID == "" || req.Server.ID != req.Issuer:
		return nil, errors.New("not signed by the server that asks")
	case req.Server.XKey != serverXKey:
		return nil, errors.New("sealed with a key that is not the server's")
	case !nkeys.IsValidPublicUserKey(req.UserNkey):
		return nil, errors.New("no user key")
	}
	return req, nil
}

// signedNonce reports whether the client proved that it holds the seed of public: its signature over the nonce that the
// server gave this connection.
func signedNonce(public, nonce, signature string) bool {
	if nonce == "" || signature == "" || !nkeys.IsValidPublicUserKey(public) {
		return false
	}
	raw, err := base64.RawURLEncoding.DecodeString(signature)
	if err != nil {
		return false
	}
	key, err := nkeys.FromPublicKey(public)
	if err != nil {
		return false
	}
	return key.Verify([]byte(nonce), raw) == nil
}
