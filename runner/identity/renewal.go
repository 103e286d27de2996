package identity

import (
	"time"

	"github.com/org-runink/runbus/schemas"
)

// renewalHold is how long the fresh key of a renewal belongs to the replica that asked for it: longer than a replica goes on with one
// (cp/enrol: 15 s), so that two of them never record and install past each other.
const renewalHold = 30 * time.Second

// Renewals carries out what a control plane orders over the bus (SPEC C8). It belongs to one Store and is not safe for concurrent use.
type Renewals struct {
	store  *Store
	now    func() time.Time
	holder string // the replica whose renewal is under way
	since  time.Time
}

// NewRenewals makes one.
func NewRenewals(s *Store) *Renewals { return &Renewals{store: s, now: time.Now} }

// Request makes a fresh key and returns a request for it with the fingerprint of the certificate in place. It is CodeConflict while
// another replica's renewal may be under way.
func (r *Renewals) Request(replica string) (csrDER []byte, fingerprint string, err error) {
	if r.holder != "" && r.holder != replica && r.now().Sub(r.since) < renewalHold {
		return nil, "", schemas.Errorf(schemas.CodeConflict, "another replica of the control plane is renewing this certificate").
			WithHint("it is tried again by itself")
	}
	key, err := r.store.RenewalKey()
	if err != nil {
		return nil, "", err
	}
	csr, err := Request(key, r.store.RunnerID())
	if err != nil {
		return nil, "", err
	}
	r.holder, r.since = replica, r.now()
	return csr, r.store.Fingerprint(), nil
}

// Install puts the certificate for the key of the last Request in place and returns its fingerprint. It is for the next link; the
// present one stands until the control plane has it.
func (r *Renewals) Install(replica string, chainPEM []byte) (fingerprint string, err error) {
	if r.holder != replica {
		return "", schemas.Errorf(schemas.CodeConflict, "no renewal of this replica is under way")
	}
	if err := r.store.InstallNext(chainPEM); err != nil {
		return "", err
	}
	r.holder = ""
	return r.store.Fingerprint(), nil
}
