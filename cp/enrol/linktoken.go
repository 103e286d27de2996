package enrol

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nkeys"

	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/schemas"
)

// LinkTokenLife is how long a link token may be shown.
const LinkTokenLife = 10 * time.Second

// linkTokenLabel keeps the signature of a link token from being taken for another one of the same key.
const linkTokenLabel = "runbus/link-token/1\n" //nolint:gosec // a label, no secret

// maxLinkToken bounds what is decoded.
const maxLinkToken = 1024

// linkClaims is what a link token says.
type linkClaims struct {
	Tenant      string `json:"t"`
	Runner      string `json:"r"`
	Fingerprint string `json:"f"`
	Server      string `json:"s"`
	Nonce       string `json:"n"`
	Expires     int64  `json:"e"` // Unix milliseconds
}

// LinkTokens makes and takes the tokens that carry the identity of a TLS handshake over to the NATS connection inside of it: bound to
// runner, leaf and server, for LinkTokenLife, once. Replicas that share the key take each other's; that one is taken once holds for
// those taken here, and the server asks the callout of its own replica. Safe for concurrent use.
type LinkTokens struct {
	key nkeys.KeyPair

	mu   sync.Mutex
	used map[string]time.Time // nonce → when its token expires
}

// NewLinkTokens signs with key, a private key of the installation.
func NewLinkTokens(key nkeys.KeyPair) *LinkTokens {
	return &LinkTokens{key: key, used: make(map[string]time.Time)}
}

// Sign makes a token. It is a secret until it was taken.
func (l *LinkTokens) Sign(who auth.LinkIdentity, serverID string, now time.Time) (string, error) {
	body, err := json.Marshal(linkClaims{
		Tenant: who.Ref.Tenant, Runner: who.Ref.Runner, Fingerprint: who.Fingerprint, Server: serverID, Nonce: schemas.NewID(),
		Expires: now.Add(LinkTokenLife).UnixMilli(),
	})
	if err != nil {
		return "", err
	}
	signature, err := l.key.Sign(append([]byte(linkTokenLabel), body...))
	if err != nil {
		return "", err
	}
	enc := base64.RawURLEncoding
	return auth.LinkTokenPrefix + enc.EncodeToString(body) + "." + enc.EncodeToString(signature), nil
}

// Take verifies a token that is shown at serverID and uses it up. No error repeats it.
func (l *LinkTokens) Take(token, serverID string, now time.Time) (auth.LinkIdentity, error) {
	none := auth.LinkIdentity{}
	body, signature, err := splitLinkToken(token)
	if err != nil {
		return none, err
	}
	if l.key.Verify(append([]byte(linkTokenLabel), body...), signature) != nil {
		return none, errors.New("its signature does not verify")
	}
	var c linkClaims
	if err := json.Unmarshal(body, &c); err != nil {
		return none, errors.New("it is not readable")
	}
	expires := time.UnixMilli(c.Expires)
	switch {
	case c.Server != serverID:
		return none, errors.New("it was made for another server")
	case !now.Before(expires), expires.Sub(now) > LinkTokenLife+time.Second:
		return none, errors.New("it has expired")
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for nonce, until := range l.used {
		if now.After(until) {
			delete(l.used, nonce)
		}
	}
	if _, again := l.used[c.Nonce]; again {
		return none, errors.New("it was used before")
	}
	l.used[c.Nonce] = expires
	return auth.LinkIdentity{Ref: schemas.RunnerRef{Tenant: c.Tenant, Runner: c.Runner}, Fingerprint: c.Fingerprint}, nil
}

func splitLinkToken(token string) (body, signature []byte, err error) {
	bad := errors.New("it is not readable")
	rest, ok := strings.CutPrefix(token, auth.LinkTokenPrefix)
	if !ok || len(token) > maxLinkToken {
		return nil, nil, bad
	}
	left, right, ok := strings.Cut(rest, ".")
	if !ok {
		return nil, nil, bad
	}
	if body, err = base64.RawURLEncoding.DecodeString(left); err != nil {
		return nil, nil, bad
	}
	if signature, err = base64.RawURLEncoding.DecodeString(right); err != nil {
		return nil, nil, bad
	}
	return body, signature, nil
}
