package auth

import (
	"errors"
	"time"

	"github.com/nats-io/jwt/v2"

	"github.com/org-runink/runbus/schemas"
)

// LinkTokenPrefix begins the token that a dialled runner shows as its NATS password.
const LinkTokenPrefix = "rlt1."

// LinkIdentity is who a link token was made for: the runner whose leaf proved itself in the handshake of that link, or the managed
// runner that this control plane started, for the link that it handed to it.
type LinkIdentity struct {
	Ref         schemas.RunnerRef
	Fingerprint string // of the leaf, or of the key of the managed runner's process; hex SHA-256
}

// LinkUser is the NATS user name of a dialled runner.
func LinkUser(ref schemas.RunnerRef) string { return ref.String() }

// LinkConfig is what the callout needs to let dialled runners in (DESIGN, "Accounts and identity"). Its functions answer from
// memory.
type LinkConfig struct {
	// Token takes a link token that a client of this server shows, once.
	Token func(token, serverID string, now time.Time) (LinkIdentity, error)
	// Leaf is when a leaf that this runner may have now ends, or the link of a managed runner's process. An error of CodeUnavailable says
	// nothing of the leaf.
	Leaf func(ref schemas.RunnerRef, fingerprint string) (notAfter time.Time, err error)
	// InProcess says that links are spliced into a server of the same process: a token is then taken from a connection within it only,
	// never from one that came in by a port.
	InProcess bool
	// OnEnded has a function called whenever the leaf of some runner may have ended. Nil: scans find them.
	OnEnded func(fn func())
}

// leafTag is the tag of a dialled runner's connection, as connection events show it.
const leafTag = "leaf:"

// decideLink is for a client that shows a link token: the runner at the other end of a connection that a replica dialled, or handed to
// its managed runner. It may do what an outbound runner may.
func (s *callout) decideLink(req *jwt.AuthorizationRequestClaims) verdict {
	o := req.ConnectOptions
	if s.c.Link.Token == nil {
		return refusal("no dialled runners are let in here")
	}
	if s.c.Link.InProcess && req.ClientInformation.Host != "" { // before it is used up: it is still its runner's
		return refusal("a link token was shown on a port")
	}
	who, err := s.c.Link.Token(o.Password, req.Server.ID, s.a.now())
	if err != nil {
		return refusal("link token: " + err.Error())
	}
	notAfter, err := s.c.Link.Leaf(who.Ref, who.Fingerprint)
	if err != nil {
		return refusal("leaf certificate: " + err.Error())
	}
	id, nonce, err := schemas.ParseConnectName(o.Name)
	switch {
	case err != nil:
		return refusal(err.Error())
	case id != who.Ref.Runner || o.Username != LinkUser(who.Ref):
		return refusal("the link token is another runner's")
	case !schemas.IsDialledID(id) && (id != schemas.ConsoleRunner || !s.c.Link.InProcess):
		return refusal("neither the id of a dialled runner, nor the managed runner of this host")
	}
	publish, subscribe := schemas.RunnerPermissions(who.Ref)
	return verdict{
		inProcess: s.c.Link.InProcess, // the server holds to it too
		place:     placeRun, name: who.Ref.String(), subjects: Subjects{Publish: publish, Subscribe: subscribe},
		tags: jwt.TagList{leafTag + who.Fingerprint, nonceTag + nonce}, expires: notAfter, maxSubs: 256,
		tenant: who.Ref.Tenant, runner: id, key: leafTag + who.Fingerprint, actor: "runner:" + id,
	}
}

// leafEnded reports whether the leaf of a dialled runner's connection may not be connected any more.
func (k *kicker) leafEnded(c connection, fingerprint string) bool {
	ref, err := schemas.ParseRunnerRef(c.User)
	if err != nil || k.s.c.Link.Leaf == nil {
		return true
	}
	notAfter, err := k.s.c.Link.Leaf(ref, fingerprint)
	if errors.Is(err, &schemas.Error{Code: schemas.CodeUnavailable}) {
		return false
	}
	return err != nil || k.s.a.now().After(notAfter)
}
