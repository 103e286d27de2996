package auth

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// seedProof is the option of a client that holds a seed.
func seedProof(t *testing.T, seed []byte) nats.Option {
	t.Helper()
	key, err := nkeys.FromSeed(seed)
	must(t, err)
	public, err := key.PublicKey()
	must(t, err)
	return nats.Nkey(public, key.Sign)
}

func TestWhoLandsWhere(t *testing.T) {
	e := newEnv(t)
	e.serve(t)
	admin, adminToken := e.tenant(t, "acme")
	rival, _ := e.tenant(t, "rival")
	good, goodSecret := e.key(t, admin, "edge")
	holder, holderSecret := e.key(t, admin, "holder")
	foreign, foreignSecret := e.key(t, rival, "edge")
	revoked, revokedSecret := e.key(t, admin, "revoked")
	_, err := e.auth.RevokeKey(t.Context(), admin, revoked.ID)
	must(t, err)
	// A key that is a year old today.
	e.clock.set(-KeyLife - time.Hour)
	expired, expiredSecret := e.key(t, admin, "expired")
	e.clock.set(0)
	unknown, err := nkeys.CreateUser()
	must(t, err)
	unknownSeed, err := unknown.Seed()
	must(t, err)
	e.bind(schemas.RunnerRef{Tenant: "acme", Runner: "bound"}, holder.PublicKey)
	e.bind(schemas.RunnerRef{Tenant: "acme", Runner: "freed"}, revoked.PublicKey)
	gone := schemas.NewSessionToken()

	named := func(id string) nats.Option { return nats.Name(schemas.ConnectName(id, "n1")) }
	for _, c := range []struct {
		what    string
		options []nats.Option
		account string // "" refused
		user    string
	}{
		{"a key", []nats.Option{proof(good, goodSecret), named("edge-1")}, "RUN", "acme/edge-1"},
		{"a key, an id with a dot", []nats.Option{proof(good, goodSecret), named("a.b")}, "RUN", "acme/a.b"},
		{"a key, the longest id", []nats.Option{proof(good, goodSecret), named(strings.Repeat("x", 64))}, "RUN", "acme/" + strings.Repeat("x", 64)},
		{"a key of another tenant, the same id", []nats.Option{proof(foreign, foreignSecret), named("edge-1")}, "RUN", "rival/edge-1"},
		{"the key that holds the id", []nats.Option{proof(holder, holderSecret), named("bound")}, "RUN", "acme/bound"},
		{"an id bound in another tenant", []nats.Option{proof(foreign, foreignSecret), named("bound")}, "RUN", "rival/bound"},
		{"an id whose key was revoked", []nats.Option{proof(good, goodSecret), named("freed")}, "RUN", "acme/freed"},
		{"an id bound to another key", []nats.Option{proof(good, goodSecret), named("bound")}, "JAIL", "refused:bound"},
		{"a revoked key", []nats.Option{proof(revoked, revokedSecret), named("edge-1")}, "JAIL", "refused:edge-1"},
		{"an expired key", []nats.Option{proof(expired, expiredSecret), named("edge-1")}, "JAIL", "refused:edge-1"},
		{"the console's id", []nats.Option{proof(good, goodSecret), named("console")}, "JAIL", "refused:console"},
		{"an admin's session as a token", []nats.Option{nats.Token(adminToken), named("edge-1")}, "JAIL", "refused:edge-1"},
		{"an admin's session as a password", []nats.Option{nats.UserInfo("owner", adminToken), named("edge-1")}, "JAIL", "refused:edge-1"},
		{"an admin's session, no name", []nats.Option{nats.Token(adminToken)}, "JAIL", "refused:invalid"},
		{"ops", []nats.Option{seedProof(t, e.Keys.OpsSeed())}, "OPS", "ops"},
		{"ops' system user", []nats.Option{seedProof(t, e.Keys.OpsSysSeed())}, "SYS", "ops-sys"},
		{"an unknown key", []nats.Option{seedProof(t, unknownSeed), named("edge-1")}, "", ""},
		{"a session that is none", []nats.Option{nats.Token(gone), named("edge-1")}, "", ""},
		{"a damaged session", []nats.Option{nats.Token("rst1.x"), named("edge-1")}, "", ""},
		{"a password", []nats.Option{nats.UserInfo("admin", "admin"), named("edge-1")}, "", ""},
		{"nothing", []nats.Option{named("edge-1")}, "", ""},
		{"a public key without a signature", []nats.Option{nats.Nkey(good.PublicKey, func([]byte) ([]byte, error) { return nil, nil }), named("edge-1")}, "", ""},
		{"a forged signature", []nats.Option{nats.Nkey(good.PublicKey, unknown.Sign), named("edge-1")}, "", ""},
		{"ops, forged", []nats.Option{nats.Nkey(e.Keys.OpsPublic(), unknown.Sign)}, "", ""},
		{"ops' system user, forged", []nats.Option{nats.Nkey(e.Keys.OpsSysPublic(), goodSecret.Key.Sign)}, "", ""},
		{"the control plane's user, forged", []nats.Option{nats.Nkey(e.Keys.Public(embedded.UserSec), unknown.Sign)}, "", ""},
	} {
		t.Run(c.what, func(t *testing.T) {
			nc, err := e.dial(t, c.options...)
			if c.account == "" {
				if !errors.Is(err, nats.ErrAuthorization) {
					t.Errorf("not refused: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			account, at := e.place(t, nc)
			if account != c.account || at.User != c.user {
				t.Errorf("landed in %s as %s, want %s as %s", account, at.User, c.account, c.user)
			}
			if c.account == "RUN" && (len(at.Tags) != 2 || !strings.HasPrefix(at.Tags[0], "key:U") || at.Tags[1] != "nonce:n1") {
				t.Errorf("tags = %v", at.Tags)
			}
		})
	}
}

func TestASignatureIsGoodForOneNonce(t *testing.T) {
	e := newEnv(t)
	e.serve(t)
	admin, _ := e.tenant(t, "acme")
	key, secret := e.key(t, admin, "edge")
	ref := schemas.RunnerRef{Tenant: "acme", Runner: "edge-1"}
	var caught []byte
	nc, err := e.runner(t, ref, nats.Nkey(key.PublicKey, func(nonce []byte) ([]byte, error) {
		sig, err := secret.Key.Sign(nonce)
		caught = slices.Clone(sig)
		return sig, err
	}))
	must(t, err)
	nc.Close()
	_, err = e.runner(t, ref, nats.Nkey(key.PublicKey, func([]byte) ([]byte, error) { return caught, nil }))
	if len(caught) == 0 || !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("a caught signature: %v", err)
	}
}

func TestBadRunnerIDsGetATextAndNoPermission(t *testing.T) {
	e := newEnv(t)
	e.serve(t)
	admin, _ := e.tenant(t, "acme")
	key, secret := e.key(t, admin, "edge")
	for id, text := range map[string]string{
		"":                       "the runner id is empty: set RUNNER_ID to 1-64 of A-Z a-z 0-9 - _ .",
		strings.Repeat("x", 65):  "the runner id has 65 characters: at most 64 of A-Z a-z 0-9 - _ . are allowed",
		"*":                      `the runner id has '*' at position 1: only A-Z a-z 0-9 - _ . are allowed`,
		">":                      `the runner id has '>' at position 1: only A-Z a-z 0-9 - _ . are allowed`,
		"a b":                    `the runner id has ' ' at position 2: only A-Z a-z 0-9 - _ . are allowed`,
		"a\x07":                  `the runner id has '\a' at position 2: only A-Z a-z 0-9 - _ . are allowed`,
		"läufer":                 `the runner id has 'ä' at position 2: only A-Z a-z 0-9 - _ . are allowed`,
		"x/../y":                 `the runner id has '/' at position 2: only A-Z a-z 0-9 - _ . are allowed`,
		"edge.*":                 `the runner id has '*' at position 6: only A-Z a-z 0-9 - _ . are allowed`,
		"=2E":                    `the runner id has '=' at position 1: only A-Z a-z 0-9 - _ . are allowed`,
		"a.runner.b.work.>":      `the runner id has '>' at position 17: only A-Z a-z 0-9 - _ . are allowed`,
		strings.Repeat("x", 400): "the runner id has 400 characters: at most 64 of A-Z a-z 0-9 - _ . are allowed",
	} {
		t.Run(clip(id), func(t *testing.T) {
			at := schemas.RunnerRef{Tenant: "acme", Runner: jailNobody}
			nc, err := e.dial(t, proof(key, secret), nats.Name(schemas.ConnectName(id, "n1")), nats.CustomInboxPrefix(schemas.InboxPrefix(at)))
			must(t, err)
			if account, as := e.place(t, nc); account != "JAIL" || as.User != "refused:invalid" {
				t.Errorf("landed in %s as %s", account, as.User)
			}
			valid := strings.ToValidUTF8(id, "")
			why := ask(t, nc, at, &runbusv1.RunnerHello{RunnerId: valid, ProcessNonce: "n1"}, secret)
			if valid == id && why.GetMessage() != text {
				t.Errorf("told %q, want %q", why.GetMessage(), text)
			}
		})
	}
}

// ask says hello in JAIL, signed by secret unless that is empty, and returns the reason.
func ask(t *testing.T, nc *nats.Conn, at schemas.RunnerRef, hello *runbusv1.RunnerHello, secret schemas.ServiceToken) *runbusv1.ErrorDetail {
	t.Helper()
	if secret.Key != nil {
		public, err := secret.Key.PublicKey()
		must(t, err)
		hello.PublicKey = public
		hello.Signature, err = secret.Key.Sign(schemas.HelloSigningInput(at, hello))
		must(t, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var answer runbusv1.EnrollmentAccepted
	if err := bus.NewConn(nc).Request(ctx, schemas.HelloSubject(at), hello, &answer); err != nil {
		t.Fatalf("hello in JAIL: %v", err)
	}
	if answer.GetError() == nil || answer.GetSession() != "" || answer.GetTenantId() != "" {
		t.Fatalf("answer in JAIL: %v", &answer)
	}
	if !answer.GetFatal() {
		t.Errorf("the refusal %q is not for good", answer.GetError().GetMessage())
	}
	return answer.GetError()
}

func TestTheJailTellsWhy(t *testing.T) {
	e := newEnv(t)
	e.serve(t)
	admin, adminToken := e.tenant(t, "acme")
	key, secret := e.key(t, admin, "edge")
	holder, _ := e.key(t, admin, "holder")
	revoked, revokedSecret := e.key(t, admin, "old")
	_, err := e.auth.RevokeKey(t.Context(), admin, revoked.ID)
	must(t, err)
	e.clock.set(-KeyLife - time.Hour)
	expired, expiredSecret := e.key(t, admin, "past")
	e.clock.set(0)
	e.bind(schemas.RunnerRef{Tenant: "acme", Runner: "bound"}, holder.PublicKey)

	for _, c := range []struct {
		what   string
		as     nats.Option
		at     schemas.RunnerRef
		secret schemas.ServiceToken
		text   string
	}{
		{"person", nats.Token(adminToken), schemas.RunnerRef{Tenant: schemas.NoTenant, Runner: "edge-1"}, schemas.ServiceToken{},
			"runner enrolment requires a service-account credential; a user session token cannot enrol a runner"},
		{"revoked", proof(revoked, revokedSecret), schemas.RunnerRef{Tenant: "acme", Runner: "edge-1"}, revokedSecret,
			`the service-account key "sa-old" was revoked`},
		{"expired", proof(expired, expiredSecret), schemas.RunnerRef{Tenant: "acme", Runner: "a.b"}, expiredSecret,
			`the service-account key "sa-past" has expired`},
		{"bound", proof(key, secret), schemas.RunnerRef{Tenant: "acme", Runner: "bound"}, secret,
			`the runner id "bound" is bound to another service-account key`},
		{"console", proof(key, secret), schemas.RunnerRef{Tenant: "acme", Runner: "console"}, secret,
			`the runner id "console" is reserved`},
	} {
		t.Run(c.what, func(t *testing.T) {
			nc, err := e.runner(t, c.at, c.as)
			must(t, err)
			why := ask(t, nc, c.at, &runbusv1.RunnerHello{RunnerId: c.at.Runner, ProcessNonce: "n1"}, c.secret)
			if why.GetMessage() != c.text {
				t.Errorf("told %q, want %q", why.GetMessage(), c.text)
			}
		})
	}

	t.Run("the state of a key is told to its holder only", func(t *testing.T) {
		at := schemas.RunnerRef{Tenant: "acme", Runner: "edge-1"}
		nc, err := e.runner(t, at, nats.Token(adminToken))
		must(t, err)
		why := ask(t, nc, at, &runbusv1.RunnerHello{RunnerId: "edge-1", PublicKey: revoked.PublicKey, Signature: []byte("x")}, schemas.ServiceToken{})
		if why.GetMessage() != "the hello is not signed by the key that it names" {
			t.Errorf("told %q", why.GetMessage())
		}
	})
}

func TestTheJailIsNarrow(t *testing.T) {
	e := newEnv(t)
	e.serve(t)
	_, token := e.tenant(t, "acme")
	at := schemas.RunnerRef{Tenant: schemas.NoTenant, Runner: "edge-1"}
	violations := make(chan error, 16)
	nc, err := e.runner(t, at, nats.Token(token), nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { violations <- err }))
	must(t, err)
	for _, subject := range []string{
		"runbus.v1.acme.runner.edge-1.heartbeat", "runbus.v1.acme.runner.edge-2.hello", "runbus.v1.acme.runner.edge-1.inbox.x",
		"$JS.API.INFO", "$SYS.REQ.USER.AUTH", "x",
	} {
		must(t, nc.Publish(subject, nil))
		if err := wait(t, "the violation of publishing "+subject, violations); !errors.Is(err, nats.ErrPermissionViolation) {
			t.Errorf("publish %s: %v", subject, err)
		}
	}
	for _, subject := range []string{">", "runbus.v1.*.runner.*.hello", "runbus.v1.*.runner.edge-2.inbox.>", "_INBOX.>", "$SYS.>"} {
		_, err := nc.SubscribeSync(subject)
		must(t, err)
		if err := wait(t, "the violation of subscribing "+subject, violations); !errors.Is(err, nats.ErrPermissionViolation) {
			t.Errorf("subscribe %s: %v", subject, err)
		}
	}
	// A hello whose reply is elsewhere is not answered there, nor anywhere.
	listener := e.Conn(t, embedded.UserJail)
	elsewhere, err := listener.SubscribeSync(schemas.AllHellos)
	must(t, err)
	must(t, listener.FlushTimeout(patience))
	hello, err := bus.NewMsg(schemas.HelloSubject(at), &runbusv1.RunnerHello{RunnerId: "edge-1"})
	must(t, err)
	hello.Reply = "runbus.v1.acme.runner.other.hello"
	must(t, nc.PublishMsg(hello))
	ask(t, nc, at, &runbusv1.RunnerHello{RunnerId: "edge-1"}, schemas.ServiceToken{})
	must(t, listener.FlushTimeout(patience)) // an answer to the first would have been sent before that to the second
	for range 2 {                            // the two hellos, and no answer
		msg, err := elsewhere.NextMsg(patience)
		must(t, err)
		if bus.TypeOf(msg) != "RunnerHello" {
			t.Errorf("an answer went to %s", msg.Subject)
		}
	}
	if n, _, err := elsewhere.Pending(); err != nil || n != 0 {
		t.Errorf("%d more messages came (%v)", n, err)
	}
}

// Who is in JAIL is put out when the time there is over, ten seconds unless it is set.
func TestTheTimeInJailEnds(t *testing.T) {
	for stay := 2 * time.Second; ; stay *= 3 { // that it may take to connect
		e := newEnv(t)
		e.serve(t, func(c *CalloutConfig) { c.JailTime = stay })
		_, token := e.tenant(t, "acme")
		o, ended := ends()
		_, err := e.runner(t, schemas.RunnerRef{Tenant: schemas.NoTenant, Runner: "edge-1"}, nats.Token(token), o)
		if err == nil {
			wait(t, "the end of the time in JAIL", ended)
			break
		}
		if stay > patience {
			t.Fatal(err)
		}
	}
	c := CalloutConfig{}.withDefaults(nil)
	before := time.Now()
	claims, err := jail(schemas.ConnectName("edge-1", "n1"), schemas.ErrPersonCannotEnrol(), c.JailTime).claims("U")
	must(t, err)
	const stay = 10 * time.Second
	if end := claims.Expires; end < before.Add(stay).Unix() || end > time.Now().Add(stay).Unix() {
		t.Errorf("the time in JAIL that began between %v and now is over at %v", before, time.Unix(end, 0))
	}
}

func TestARunnerReachesItsOwnSubjectsOnly(t *testing.T) {
	t.Run("outbound", func(t *testing.T) {
		e := newEnv(t)
		e.serve(t)
		admin, _ := e.tenant(t, "acme")
		key, secret := e.key(t, admin, "edge")
		reachesItsOwnOnly(t, e, schemas.RunnerRef{Tenant: "acme", Runner: "a.b"}, "runbus.v1.acme.runner.a=2Eb.", func(ref schemas.RunnerRef, o nats.Option) (*nats.Conn, error) {
			return e.runner(t, ref, proof(key, secret), o)
		})
	})
	t.Run("dialled", func(t *testing.T) {
		e := newEnv(t)
		e.serve(t)
		ref := schemas.RunnerRef{Tenant: "acme", Runner: schemas.NewRunnerID()}
		reachesItsOwnOnly(t, e, ref, "runbus.v1.acme.runner."+ref.Runner+".", func(ref schemas.RunnerRef, o nats.Option) (*nats.Conn, error) {
			return e.linked(t, ref, e.links.token(t, e.ID(), ref, "leaf-1"), o)
		})
	})
}

func reachesItsOwnOnly(t *testing.T, e *env, ref schemas.RunnerRef, own string, connect func(schemas.RunnerRef, nats.Option) (*nats.Conn, error)) {
	violations := make(chan error, 16)
	nc, err := connect(ref, nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { violations <- err }))
	must(t, err)
	for _, subject := range []string{
		strings.Replace(own, "acme", "rival", 1) + "hello", "runbus.v1.acme.runner.other.hello", "runbus.v1.acme.runner.a.b.hello",
		own + "work.s", own + "control.s", own + "inbox.x", "$JS.API.INFO", "$KV.runbus_identities.x", "$SYS.REQ.SERVER.PING",
		"$SYS.REQ.USER.AUTH", "$SYS._INBOX.x", "$SRV.PING", "_INBOX.x",
	} {
		must(t, nc.Publish(subject, nil))
		if err := wait(t, "the violation of publishing "+subject, violations); !errors.Is(err, nats.ErrPermissionViolation) {
			t.Errorf("publish %s: %v", subject, err)
		}
	}
	for _, subject := range []string{
		">", "runbus.v1.>", "runbus.v1.acme.runner.*.work.*", strings.Replace(own, "acme", "rival", 1) + "work.*", own + ">", own + "hello",
		own + "result.>", "$SYS.>", "_INBOX.>", "$JS.>",
	} {
		sub, err := nc.QueueSubscribeSync(subject, "q")
		must(t, err)
		if err := wait(t, "the violation of subscribing "+subject, violations); !errors.Is(err, nats.ErrPermissionViolation) {
			t.Errorf("subscribe %s: %v", subject, err)
		}
		_ = sub.Unsubscribe()
	}
	// What is its own works.
	server := e.Conn(t, embedded.UserServe)
	serve, err := server.SubscribeSync(schemas.AllHellos)
	must(t, err)
	must(t, server.FlushTimeout(patience))
	sub, err := nc.SubscribeSync(schemas.WorkSubject(ref, "s1"))
	must(t, err)
	must(t, nc.FlushTimeout(patience))
	must(t, e.Conn(t, embedded.UserDispatch).Publish(schemas.WorkSubject(ref, "s1"), []byte("work")))
	if msg, err := sub.NextMsg(patience); err != nil || string(msg.Data) != "work" {
		t.Errorf("work: %v", err)
	}
	must(t, nc.Publish(schemas.HelloSubject(ref), []byte("hello")))
	if msg, err := serve.NextMsg(patience); err != nil || string(msg.Data) != "hello" {
		t.Errorf("hello: %v", err)
	}
	select {
	case err := <-violations:
		t.Errorf("unexpected: %v", err)
	default:
	}
}

func TestAStaleViewLetsNoNewRunnerIn(t *testing.T) {
	e := newEnv(t)
	e.serve(t)
	admin, token := e.tenant(t, "acme")
	key, secret := e.key(t, admin, "edge")
	ref := schemas.RunnerRef{Tenant: "acme", Runner: "edge-1"}
	live, err := e.runner(t, ref, proof(key, secret))
	must(t, err)
	e.clock.set(StaleAfter + time.Second)
	if e.auth.Fresh() {
		t.Fatal("the view is still fresh")
	}
	if _, err := e.runner(t, ref, proof(key, secret)); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("a runner was let in: %v", err)
	}
	if err := live.FlushTimeout(patience); err != nil {
		t.Errorf("the runner that was in: %v", err)
	}
	if _, err := e.dial(t, seedProof(t, e.Keys.OpsSeed())); err != nil {
		t.Errorf("ops: %v", err)
	}
	if _, err := e.auth.Authenticate(token); err != nil {
		t.Errorf("people: %v", err)
	}
	e.clock.set(0)
	if _, err := e.runner(t, ref, proof(key, secret)); err != nil {
		t.Errorf("after the confirmation: %v", err)
	}
}

func TestTheCalloutWantsItsParts(t *testing.T) {
	e := newEnv(t)
	if err := e.auth.ServeCallout(t.Context(), CalloutConfig{}); err == nil {
		t.Error("served without anything")
	}
	c := CalloutConfig{
		Conn: e.Conn(t, embedded.UserAuth), Sys: e.Conn(t, embedded.UserSys), Jail: bus.NewConn(e.Conn(t, embedded.UserJail)),
		Issuer: e.Keys.Issuer(), XKey: e.Keys.XKey(), OpsPublic: e.Keys.OpsPublic(), OpsSysPublic: e.Keys.OpsSysPublic(),
		Ops: Subjects{Publish: []string{"a"}, Subscribe: []string{"b"}}, OpsSys: Subjects{Publish: []string{"a"}}, Bound: e.boundTo,
	}
	if err := e.auth.ServeCallout(t.Context(), c); err == nil {
		t.Error("served with an empty list of permissions, which the server takes for all")
	}
	c.OpsSys.Subscribe = []string{"b"}
	c.Ready = c.Conn.Close
	if err := e.auth.ServeCallout(t.Context(), c); err == nil {
		t.Error("a closed connection is no error")
	}
}
