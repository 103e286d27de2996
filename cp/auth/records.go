package auth

import (
	"encoding/json"
	"slices"
	"strings"
	"time"
)

// What is stored in runbus_identities: JSON, a Go type a kind, told apart by the first token of the key.
//
//	operator                      personRecord of the platform's operator
//	tenant.<tenant>               tenantRecord
//	person.<tenant>.<name>        personRecord
//	session.<token hash>          sessionRecord
//	key.<tenant>.<name>           keyRecord
//
// All keys of one name are one record, so that "one live key a name", mint and revoke are one compare-and-set each, and
// nothing points from one record to another that may be missing. The index by public key is built in memory.
const (
	operatorName  = "operator"
	operatorKey   = "operator"
	tenantPrefix  = "tenant."
	personPrefix  = "person."
	sessionPrefix = "session."
	keyPrefix     = "key."
)

func tenantKey(tenant string) string        { return tenantPrefix + tenant }
func personKey(tenant, name string) string  { return personPrefix + tenant + "." + name }
func sessionKey(hash string) string         { return sessionPrefix + hash }
func keyNameKey(tenant, name string) string { return keyPrefix + tenant + "." + name }

// record is a row of any kind, not decoded yet.
type record = json.RawMessage

// tenantRecord is a tenant.
type tenantRecord struct {
	Name      string    `json:"name"`
	CreatedAt time.Time `json:"createdAt"`
	CreatedBy string    `json:"createdBy"`
}

// personRecord is a person, or the operator (no tenant).
type personRecord struct {
	Tenant    string    `json:"tenant,omitempty"`
	Name      string    `json:"name"`
	Role      Role      `json:"role"`
	CreatedAt time.Time `json:"createdAt"`
	CreatedBy string    `json:"createdBy"`
	// Generation is random. Only sessions of the same generation count: setting another one ends all of them in one
	// compare-and-set, and a person made again under an old name does not inherit sessions.
	Generation string `json:"generation"`
}

func (p personRecord) key() string {
	if p.Role == RoleOperator {
		return operatorKey
	}
	return personKey(p.Tenant, p.Name)
}

// sessionRecord is a session, stored under the hash of its token.
type sessionRecord struct {
	Tenant     string    `json:"tenant,omitempty"`
	Person     string    `json:"person"`
	Operator   bool      `json:"operator,omitempty"`
	Generation string    `json:"generation"`
	CreatedAt  time.Time `json:"createdAt"`
	ExpiresAt  time.Time `json:"expiresAt"`
}

func (s sessionRecord) personKey() string {
	if s.Operator {
		return operatorKey
	}
	return personKey(s.Tenant, s.Person)
}

// keyRecord is all keys that one name of one tenant had, oldest first. At most the last one is live.
type keyRecord struct {
	Keys []Key `json:"keys"`
}

// live returns the key of the record that may enrol, if there is one.
func (r keyRecord) live(now time.Time) (Key, bool) {
	if len(r.Keys) == 0 {
		return Key{}, false
	}
	last := r.Keys[len(r.Keys)-1]
	return last, last.RevokedAt == nil && now.Before(last.ExpiresAt)
}

// with returns the record with one more key, the oldest ones cut off.
func (r keyRecord) with(k Key) keyRecord {
	keys := append(slices.Clone(r.Keys), k)
	if over := len(keys) - maxKeyHistory - 1; over > 0 {
		keys = keys[over:]
	}
	return keyRecord{Keys: keys}
}

// Tenant is a tenant as it is listed.
type Tenant struct {
	Name      string    `json:"name"`
	CreatedAt time.Time `json:"createdAt"`
	CreatedBy string    `json:"createdBy"`
}

// Person is a person as it is listed: never with a token.
type Person struct {
	Tenant    string    `json:"tenant"`
	Name      string    `json:"name"`
	Role      Role      `json:"role"`
	CreatedAt time.Time `json:"createdAt"`
	CreatedBy string    `json:"createdBy"`
}

// Key is a service-account key. Its secret half is not in here and nowhere on this side.
type Key struct {
	ID        string     `json:"id"` // sa-<name>
	Name      string     `json:"name"`
	Tenant    string     `json:"tenant"`
	PublicKey string     `json:"publicKey"`
	CreatedAt time.Time  `json:"createdAt"`
	ExpiresAt time.Time  `json:"expiresAt"`
	CreatedBy string     `json:"createdBy"`
	RevokedAt *time.Time `json:"revokedAt,omitempty"`
}

// keyIDPrefix makes the id of a key out of its name.
const keyIDPrefix = "sa-"

// inTenant reports whether a bucket key of a kind belongs to a tenant.
func inTenant(key, prefix, tenant string) bool { return strings.HasPrefix(key, prefix+tenant+".") }
