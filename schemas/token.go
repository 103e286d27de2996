package schemas

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"strings"

	"github.com/nats-io/nkeys"
)

// Prefixes of the credentials of this platform (SPEC, "Interfaces that are fixed now").
const (
	ServiceTokenPrefix = "rsk1."
	SessionTokenPrefix = "rst1."
)

// ServiceToken is a service-account token taken apart: `rsk1.<tenant>.<nkeys user seed>`. The seed never crosses the wire;
// the tenant only builds subjects, what the bearer may do comes from the key.
type ServiceToken struct {
	Tenant string
	Key    nkeys.KeyPair
}

// NewServiceToken makes a key for a tenant and its token. The token is a secret: it is shown once and not stored.
func NewServiceToken(tenant string) (token, publicKey string, err error) {
	key, err := nkeys.CreateUser()
	if err != nil {
		return "", "", err
	}
	defer key.Wipe()
	seed, err := key.Seed()
	if err != nil {
		return "", "", err
	}
	public, err := key.PublicKey()
	if err != nil {
		return "", "", err
	}
	return ServiceTokenPrefix + tenant + "." + string(seed), public, nil
}

// ParseServiceToken reads a token. Its errors (CodeInvalid) never show a part of it.
func ParseServiceToken(token string) (ServiceToken, error) {
	rest, ok := strings.CutPrefix(token, ServiceTokenPrefix)
	tenant, seed, dot := strings.Cut(rest, ".")
	if !ok || !dot {
		return ServiceToken{}, Errorf(CodeInvalid, "this is not a service-account token (rsk1.<tenant>.<seed>)")
	}
	if err := ValidTenant(tenant); err != nil {
		return ServiceToken{}, Errorf(CodeInvalid, "the tenant in the service-account token is not valid")
	}
	key, err := nkeys.FromSeed([]byte(seed))
	if err != nil {
		return ServiceToken{}, Errorf(CodeInvalid, "the seed in the service-account token is damaged")
	}
	public, err := key.PublicKey()
	if err != nil || !nkeys.IsValidPublicUserKey(public) {
		return ServiceToken{}, Errorf(CodeInvalid, "the seed in the service-account token is not a user's")
	}
	return ServiceToken{Tenant: tenant, Key: key}, nil
}

// IsCredential reports whether s begins like a credential of this platform, which must not be repeated.
func IsCredential(s string) bool {
	return strings.HasPrefix(s, ServiceTokenPrefix) || strings.HasPrefix(s, SessionTokenPrefix) || strings.HasPrefix(s, TicketPrefix)
}

// IsSessionToken reports whether token claims to be a person's session token, valid or not.
func IsSessionToken(token string) bool { return strings.HasPrefix(token, SessionTokenPrefix) }

// NewSessionToken makes a session token, `rst1.<256 bits, base64url>`. Only its SessionTokenHash is stored.
func NewSessionToken() string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails, crypto/rand
	return SessionTokenPrefix + base64.RawURLEncoding.EncodeToString(b[:])
}

// SessionTokenHash is the key under which a session is stored: hex SHA-256 of the token. An error of CodeInvalid if token
// has not the form of one.
func SessionTokenHash(token string) (string, error) {
	rest, ok := strings.CutPrefix(token, SessionTokenPrefix)
	raw, err := base64.RawURLEncoding.DecodeString(rest)
	if !ok || err != nil || len(raw) != 32 {
		return "", Errorf(CodeInvalid, "this is not a session token (rst1.<256 bits, base64url>)")
	}
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:]), nil
}

// NewID is 128 random bits in hex: sessions, process nonces, replica boots, control ids.
func NewID() string {
	var b [16]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}
