package auth

import (
	"errors"
	"strings"
	"time"

	"github.com/nats-io/jwt/v2"

	"github.com/org-runink/runbus/schemas"
)

const (
	// jailTime is how long a client may stay in JAIL by default.
	jailTime = 10 * time.Second
	// jailNobody is the runner id in the permissions of a jailed client that gave no valid one: no permission is ever
	// built from an id that doesn't follow the grammar.
	jailNobody = "invalid"
)

// placement is an account that the callout puts clients into. The server has no setting that limits which, so this closed
// list is the limit.
type placement int

const (
	placeNowhere placement = iota
	placeRun
	placeJail
	placeOps
	placeSys
)

// account is the name of the placement in the server's configuration; "" for none.
func (p placement) account() string {
	switch p {
	case placeRun:
		return "RUN"
	case placeJail:
		return "JAIL"
	case placeOps:
		return "OPS"
	case placeSys:
		return "SYS"
	}
	return ""
}

// verdict is what becomes of a client: refused, with a text for the server's log, or placed.
type verdict struct {
	refused string

	place    placement
	name     string // of the user, in connection events
	subjects Subjects
	tags     jwt.TagList
	expires  time.Time // zero: never
	maxSubs  int64
	// inProcess: only a connection within the server's process is let in.
	inProcess bool

	// For the log and the audit: never in the answer.
	reason         *schemas.Error // why jailed
	tenant, runner string
	key            string // public key of a service account
	actor          string
}

func refusal(text string) verdict { return verdict{refused: text} }

// claims is the user that the server makes of the client. It fails rather than leave a list open.
func (v verdict) claims(userNkey string) (*jwt.UserClaims, error) {
	account := v.place.account()
	if account == "" {
		return nil, errors.New("no account to place the client in")
	}
	if len(v.subjects.Publish) == 0 || len(v.subjects.Subscribe) == 0 {
		return nil, errors.New("empty permissions would mean all")
	}
	u := jwt.NewUserClaims(userNkey)
	u.Audience = account
	u.Name = v.name
	u.Tags = v.tags
	u.Pub.Allow = v.subjects.Publish
	u.Sub.Allow = v.subjects.Subscribe
	u.Subs = v.maxSubs
	u.AllowedConnectionTypes = jwt.StringList{jwt.ConnectionTypeInProcess}
	if !v.inProcess {
		u.AllowedConnectionTypes = append(u.AllowedConnectionTypes, jwt.ConnectionTypeStandard, jwt.ConnectionTypeWebsocket)
	}
	if !v.expires.IsZero() {
		u.Expires = v.expires.Unix()
	}
	return u, nil
}

// decide says what becomes of a client. It reads memory only.
func (s *callout) decide(req *jwt.AuthorizationRequestClaims) verdict {
	o := req.ConnectOptions
	if req.ClientInformation.Kind != "Client" {
		return refusal("only clients are let in")
	}
	if o.Nkey == "" {
		return s.decideToken(req)
	}
	if !signedNonce(o.Nkey, req.ClientInformation.Nonce, o.SignedNonce) {
		return refusal("the nkey did not sign the nonce of this connection")
	}
	switch o.Nkey {
	case s.c.OpsPublic:
		return verdict{place: placeOps, name: "ops", subjects: s.c.Ops, maxSubs: 1000}
	case s.c.OpsSysPublic:
		return verdict{place: placeSys, name: "ops-sys", subjects: s.c.OpsSys, maxSubs: 1000}
	}
	return s.decideRunner(o.Nkey, o.Name)
}

// decideToken is for a client that shows a token or a password: a dialled runner, or a person's session, which is told that it can't
// enrol (SPEC E5).
func (s *callout) decideToken(req *jwt.AuthorizationRequestClaims) verdict {
	o := req.ConnectOptions
	if strings.HasPrefix(o.Password, LinkTokenPrefix) {
		return s.decideLink(req)
	}
	for _, token := range []string{o.Token, o.Password, o.Username} {
		if !schemas.IsSessionToken(token) {
			continue
		}
		p, err := s.a.Authenticate(token)
		if err != nil {
			return refusal("the session token is not valid")
		}
		v := jail(o.Name, schemas.ErrPersonCannotEnrol(), s.c.JailTime)
		v.tenant, v.actor = p.Tenant, p.Actor()
		return v
	}
	return refusal("no credential that is taken here")
}

// decideRunner is for a client that proved to hold the seed of public.
func (s *callout) decideRunner(public, connectName string) verdict {
	key, err := s.a.KeyByPublic(public)
	jailed := func(why *schemas.Error) verdict {
		v := jail(connectName, why, s.c.JailTime)
		v.tenant, v.key, v.actor = key.Tenant, public, "key:"+key.ID
		return v
	}
	switch {
	case err != nil && key.PublicKey == "":
		return refusal("the service-account key is not known")
	case err != nil:
		return jailed(asError(err))
	case !s.a.Fresh():
		return refusal("the identities are not confirmed: no new runner is let in, try again")
	}
	id, nonce, err := schemas.ParseConnectName(connectName)
	if err != nil {
		return jailed(asError(err))
	}
	if err := outboundID(id); err != nil {
		return jailed(err)
	}
	ref := schemas.RunnerRef{Tenant: key.Tenant, Runner: id}
	if s.heldByOther(ref, public) {
		return jailed(schemas.ErrRunnerBound(id))
	}
	publish, subscribe := schemas.RunnerPermissions(ref)
	return verdict{
		place: placeRun, name: ref.String(), subjects: Subjects{Publish: publish, Subscribe: subscribe},
		tags: jwt.TagList{keyTag + public, nonceTag + nonce}, expires: key.ExpiresAt, maxSubs: 256,
		tenant: ref.Tenant, runner: ref.Runner, key: public, actor: "key:" + key.ID,
	}
}

// Tags of a runner's connection, as connection events show them.
const (
	keyTag   = "key:"
	nonceTag = "nonce:"
)

// outboundID refuses a valid id that an outbound runner may not take.
func outboundID(id string) *schemas.Error {
	if id == schemas.ConsoleRunner {
		return schemas.Errorf(schemas.CodeInvalid, "the runner id %q is reserved", id).WithHint("choose another RUNNER_ID")
	}
	if schemas.IsDialledID(id) {
		return schemas.ErrDialledID(id)
	}
	return nil
}

// heldByOther reports whether a live key other than public holds the id (SPEC E4).
func (s *callout) heldByOther(ref schemas.RunnerRef, public string) bool {
	holder, ok := s.c.Bound(ref)
	if !ok || holder == public {
		return false
	}
	_, err := s.a.KeyByPublic(holder)
	return err == nil
}

// jail places a client, for a while, where it can only ask once more, as the runner it says it is, and be told why.
func jail(connectName string, why *schemas.Error, stay time.Duration) verdict {
	id, _, err := schemas.ParseConnectName(connectName)
	if err != nil {
		id = jailNobody
	}
	publish, subscribe := schemas.RefusedPermissions(id)
	return verdict{
		place: placeJail, name: "refused:" + id, subjects: Subjects{Publish: publish, Subscribe: subscribe},
		expires: time.Now().Add(stay), maxSubs: 8, reason: why, runner: id, // the server's clock: not the injected one
	}
}
