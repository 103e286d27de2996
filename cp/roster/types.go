package roster

import (
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"slices"
	"time"

	"github.com/org-runink/runbus/schemas"
)

// State is what a dialled runner is (SPEC R2).
type State string

// The states.
const (
	Pending State = "PENDING" // created, not enrolled yet
	Active  State = "ACTIVE"  // holds a certificate
	Revoked State = "REVOKED" // for good
)

// Leaf is one certificate of a runner, as it is pinned.
type Leaf struct {
	Fingerprint string    `json:"fingerprint"` // hex SHA-256 of the DER
	PublicKey   []byte    `json:"publicKey"`   // SPKI, DER
	NotBefore   time.Time `json:"notBefore"`
	NotAfter    time.Time `json:"notAfter"`
}

// Runner is one dialled runner of a tenant.
type Runner struct {
	ID      string            `json:"id"` // random, unique over all tenants
	Tenant  string            `json:"tenant"`
	Name    string            `json:"name"`    // DNS label, unique in the tenant
	Address string            `json:"address"` // canonical (schemas.Address)
	Zone    string            `json:"zone,omitempty"`
	Labels  map[string]string `json:"labels,omitempty"`
	State   State             `json:"state"`
	// Current is the leaf that is let in, nil before the enrolment. Next is the one that replaces it at its first handshake.
	Current    *Leaf      `json:"current,omitempty"`
	Next       *Leaf      `json:"next,omitempty"`
	CreatedAt  time.Time  `json:"createdAt"`
	CreatedBy  string     `json:"createdBy"`
	EnrolledAt *time.Time `json:"enrolledAt,omitempty"`
	RevokedAt  *time.Time `json:"revokedAt,omitempty"`
}

// Ref names the runner.
func (r Runner) Ref() schemas.RunnerRef { return schemas.RunnerRef{Tenant: r.Tenant, Runner: r.ID} }

// RenewableFor is how long after its end a leaf can still be renewed, and nothing else (SPEC C13).
const RenewableFor = 7 * 24 * time.Hour

// Expired says what an expired certificate means for the runner; empty while it is valid, or there is none.
func (r Runner) Expired(now time.Time) string {
	switch {
	case r.Current == nil || now.Before(r.Current.NotAfter):
		return ""
	case now.Sub(r.Current.NotAfter) > RenewableFor:
		return "certificate expired: revoke and create again"
	}
	return "certificate expired: it is renewed when the runner can be reached"
}

// clone shares nothing that is changed in place: leaves and times are replaced whole.
func (r Runner) clone() Runner {
	r.Labels = maps.Clone(r.Labels)
	return r
}

// equal compares what OnChange tells of.
func (r Runner) equal(o Runner) bool {
	sameLeaf := func(a, b *Leaf) bool {
		return (a == nil) == (b == nil) && (a == nil || a.Fingerprint == b.Fingerprint)
	}
	return r.Name == o.Name && r.Address == o.Address && r.Zone == o.Zone && r.State == o.State &&
		maps.Equal(r.Labels, o.Labels) && sameLeaf(r.Current, o.Current) && sameLeaf(r.Next, o.Next)
}

// Token is what is kept of a ticket's token: never the token.
type Token struct {
	ID        string     `json:"id"`
	RunnerID  string     `json:"runnerId"`
	SHA256    string     `json:"sha256"` // hex, of the token
	CreatedAt time.Time  `json:"createdAt"`
	ExpiresAt time.Time  `json:"expiresAt"`
	UsedAt    *time.Time `json:"usedAt,omitempty"`
	RevokedAt *time.Time `json:"revokedAt,omitempty"`
	UsedBy    string     `json:"usedBy,omitempty"` // hex SHA-256 of the SPKI of the CSR's key
	// Certificate is the PEM that was issued for the token, kept for an hour after the expiry in case the reply was lost.
	Certificate []byte `json:"certificate,omitempty"`
}

// Live reports whether the token can still enrol its runner.
func (t Token) Live(now time.Time) bool {
	return t.UsedAt == nil && t.RevokedAt == nil && now.Before(t.ExpiresAt)
}

// ended is when the token stopped being live.
func (t Token) ended() time.Time {
	at := t.ExpiresAt
	for _, end := range []*time.Time{t.UsedAt, t.RevokedAt} {
		if end != nil && end.Before(at) {
			at = *end
		}
	}
	return at
}

// Spec is a runner to be created. Address, and Zone and Labels if any, are checked by Create.
type Spec struct {
	Name, Address, Zone string
	Labels              map[string]string
}

// Change is what Edit changes; nil leaves as it is.
type Change struct {
	Name, Address, Zone *string
	Labels              *map[string]string
}

// Minted is a token on its way into a ticket: the only time that it is outside of one.
type Minted struct {
	TokenID   string
	Token     [32]byte
	ExpiresAt time.Time
}

// Claim is an enrolment whose proof was verified, to be decided (SPEC C5).
type Claim struct {
	RunnerID, TokenID string
	KeySHA256         string // hex SHA-256 of the SPKI of the CSR's key
	Leaf              Leaf
	CertificatePEM    []byte
}

// document is all of one tenant: the value of its key in the bucket.
type document struct {
	Runners []Runner `json:"runners"`
	Tokens  []Token  `json:"tokens"`
	Owed    []debt   `json:"owed,omitempty"` // to the audit log
}

// clone copies d so that it can be changed without others seeing it.
func (d document) clone() document {
	out := document{Runners: make([]Runner, len(d.Runners)), Tokens: slices.Clone(d.Tokens), Owed: slices.Clone(d.Owed)}
	for i, r := range d.Runners {
		out.Runners[i] = r.clone()
	}
	return out
}

// runner finds a runner by id or name. An id has a form that no name has.
func (d *document) runner(idOrName string) *Runner {
	for i := range d.Runners {
		if r := &d.Runners[i]; r.ID == idOrName || r.Name == idOrName {
			return r
		}
	}
	return nil
}

func (d *document) token(id string) *Token {
	for i := range d.Tokens {
		if d.Tokens[i].ID == id {
			return &d.Tokens[i]
		}
	}
	return nil
}

// revokeTokens ends the live tokens of a runner and returns their ids.
func (d *document) revokeTokens(runnerID string, now time.Time) (ids []string) {
	for i := range d.Tokens {
		if t := &d.Tokens[i]; t.RunnerID == runnerID && t.Live(now) {
			t.RevokedAt = &now
			ids = append(ids, t.ID)
		}
	}
	return ids
}

func hashOf(token [32]byte) string {
	sum := sha256.Sum256(token[:])
	return hex.EncodeToString(sum[:])
}
