package auth

import (
	"encoding/base64"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nkeys"

	"github.com/org-runink/runbus/schemas"
)

// server is a server that asks, made of its keys alone.
type server struct {
	key, x   nkeys.KeyPair
	id, xkey string
}

func newServer(t testing.TB) server {
	t.Helper()
	key, err := nkeys.CreateServer()
	must(t, err)
	x, err := nkeys.CreateCurveKeys()
	must(t, err)
	s := server{key: key, x: x}
	s.id, err = key.PublicKey()
	must(t, err)
	s.xkey, err = x.PublicKey()
	must(t, err)
	return s
}

// request is a good request, changed.
func (s server) request(t testing.TB, change func(*jwt.AuthorizationRequestClaims)) []byte {
	t.Helper()
	user, err := nkeys.CreateUser()
	must(t, err)
	public, err := user.PublicKey()
	must(t, err)
	c := jwt.NewAuthorizationRequestClaims(public)
	c.Audience, c.UserNkey = requestAudience, public
	c.Server = jwt.ServerID{ID: s.id, XKey: s.xkey}
	c.ClientInformation = jwt.ClientInformation{Kind: "Client", Nonce: "nonce"}
	change(c)
	text, err := c.Encode(s.key)
	must(t, err)
	return []byte(text)
}

func TestOnlyGoodRequestsAreRead(t *testing.T) {
	s, evil := newServer(t), newServer(t)
	keys, err := nkeys.CreateCurveKeys()
	must(t, err)
	public, err := keys.PublicKey()
	must(t, err)
	service, err := newBoxes(keys)
	must(t, err)
	good := s.request(t, func(*jwt.AuthorizationRequestClaims) {})
	seal := func(by server, plain []byte) []byte {
		sealed, err := by.x.Seal(plain, public)
		must(t, err)
		return sealed
	}
	if _, err := openRequest(service, s.xkey, seal(s, good)); err != nil {
		t.Fatalf("a good request: %v", err)
	}
	for what, c := range map[string]struct {
		xkey string
		data []byte
	}{
		"no key of the server": {"", seal(s, good)},
		"garbage for a key":    {"XGARBAGE", seal(s, good)},
		"not sealed":           {s.xkey, good},
		"empty":                {s.xkey, nil},
		"sealed by another":    {s.xkey, seal(evil, good)},
		"another's request":    {evil.xkey, seal(evil, good)},
		"signed by another than it says": {s.xkey, seal(s, s.request(t, func(c *jwt.AuthorizationRequestClaims) {
			c.Server.ID = evil.id
		}))},
		"another audience": {s.xkey, seal(s, s.request(t, func(c *jwt.AuthorizationRequestClaims) { c.Audience = "x" }))},
		"no user key":      {s.xkey, seal(s, s.request(t, func(c *jwt.AuthorizationRequestClaims) { c.UserNkey = "x" }))},
		"damaged":          {s.xkey, seal(s, append([]byte("x"), good...))},
	} {
		if _, err := openRequest(service, c.xkey, c.data); err == nil {
			t.Errorf("%s: read", what)
		}
	}
}

func TestBoxesAreThoseOfNkeys(t *testing.T) {
	keys, err := nkeys.CreateCurveKeys()
	must(t, err)
	public, err := keys.PublicKey()
	must(t, err)
	b, err := newBoxes(keys)
	must(t, err)
	for range mostShared + 3 { // more servers than are remembered
		s := newServer(t)
		for _, text := range []string{"", "text"} {
			theirs, err := s.x.Seal([]byte(text), public)
			must(t, err)
			if got, err := b.open(theirs, s.xkey); err != nil || string(got) != text {
				t.Fatalf("%q, not %q: %v", got, text, err)
			}
			ours, err := b.seal([]byte(text), s.xkey)
			must(t, err)
			if got, err := s.x.Open(ours, public); err != nil || string(got) != text {
				t.Fatalf("%q, not %q: %v", got, text, err)
			}
		}
	}
	if len(b.shared) > mostShared {
		t.Errorf("%d servers are remembered", len(b.shared))
	}
	user, err := nkeys.CreateUser()
	must(t, err)
	if _, err := newBoxes(user); err == nil {
		t.Error("the key of a user is taken")
	}
}

func FuzzBoxOpen(f *testing.F) {
	keys, err := nkeys.CreateCurveKeys()
	must(f, err)
	public, err := keys.PublicKey()
	must(f, err)
	b, err := newBoxes(keys)
	must(f, err)
	s := newServer(f)
	good, err := s.x.Seal([]byte("text"), public)
	must(f, err)
	f.Add(good, s.xkey)
	f.Add(good[:30], s.xkey)
	f.Add([]byte("xkv1"), "X")
	f.Fuzz(func(t *testing.T, data []byte, from string) {
		plain, err := b.open(data, from)
		theirs, theirErr := keys.Open(data, from)
		if (err == nil) != (theirErr == nil) || string(plain) != string(theirs) {
			t.Errorf("%q, %v; nkeys: %q, %v", plain, err, theirs, theirErr)
		}
	})
}

func TestSignedNonce(t *testing.T) {
	key, err := nkeys.CreateUser()
	must(t, err)
	public, err := key.PublicKey()
	must(t, err)
	raw, err := key.Sign([]byte("nonce"))
	must(t, err)
	sig := base64.RawURLEncoding.EncodeToString(raw)
	if !signedNonce(public, "nonce", sig) {
		t.Error("a good signature is refused")
	}
	for _, c := range [][3]string{
		{public, "other", sig}, {public, "", sig}, {public, "nonce", ""}, {"", "nonce", sig}, {public[1:], "nonce", sig},
		{public, "nonce", sig[1:]}, {public, "nonce", "%%%"}, {public, "nonce", base64.RawURLEncoding.EncodeToString(make([]byte, 64))},
	} {
		if signedNonce(c[0], c[1], c[2]) {
			t.Errorf("accepted: %v", c)
		}
	}
	empty, err := key.Sign(nil)
	must(t, err)
	if signedNonce(public, "", base64.RawURLEncoding.EncodeToString(empty)) {
		t.Error("a signature over no nonce is accepted")
	}
}

func TestServerInbox(t *testing.T) {
	for reply, want := range map[string]bool{
		"$SYS._INBOX.abc": true, "$SYS._INBOX.abc.def": true, "": false, "$SYS._INBOX.": false, "$SYS._INBOX": false,
		"$SYS._INBOX.*": false, "$SYS._INBOX.>": false, "$SYS._INBOX.a..b": false, "$SYS._INBOX.a b": false,
		"_INBOX.a": false, "$JS.API.STREAM.DELETE.x": false, "$KV.x": false, "x$SYS._INBOX.a": false,
	} {
		if isServerInbox(reply) != want {
			t.Errorf("%q: %t", reply, !want)
		}
	}
}

func TestPlacementsAreAClosedList(t *testing.T) {
	got := map[string]bool{}
	for p := placement(-3); p < 50; p++ {
		got[p.account()] = true
	}
	for _, account := range []string{"", "RUN", "JAIL", "OPS", "SYS"} {
		if !got[account] {
			t.Errorf("%q is missing", account)
		}
		delete(got, account)
	}
	if len(got) != 0 {
		t.Errorf("also: %v", got)
	}
	lists := Subjects{Publish: []string{"a"}, Subscribe: []string{"b"}}
	for what, v := range map[string]verdict{
		"nowhere": {subjects: lists}, "no publish list": {place: placeRun, subjects: Subjects{Subscribe: lists.Subscribe}},
		"no subscribe list": {place: placeJail, subjects: Subjects{Publish: lists.Publish}},
	} {
		if _, err := v.claims("U"); err == nil {
			t.Errorf("%s: a user was made", what)
		}
	}
}

func TestNotesAreOncePerMinute(t *testing.T) {
	c := &clock{}
	n := newNotes(c.Now)
	if !n.first("a") || n.first("a") || !n.first("b") {
		t.Error("the same note twice, or one not at all")
	}
	c.set(61 * time.Second)
	if !n.first("a") {
		t.Error("not noted again after a minute")
	}
}

// FuzzParseRequest feeds foreign bytes to what reads a request, and whatever is read to what decides on it.
func FuzzParseRequest(f *testing.F) {
	s := newServer(f)
	good := s.request(f, func(*jwt.AuthorizationRequestClaims) {})
	f.Add(good)
	f.Add([]byte(""))
	f.Add([]byte("a.b.c"))
	f.Add([]byte(strings.Replace(string(good), ".", "..", 1)))
	f.Fuzz(func(t *testing.T, plain []byte) {
		req, err := parseRequest(plain, s.xkey)
		if err != nil {
			return
		}
		if req.Server.ID != s.id || req.Issuer != s.id || !nkeys.IsValidPublicUserKey(req.UserNkey) {
			t.Errorf("read: %v", req)
		}
	})
}

// FuzzJail builds permissions from a foreign connection name: they are always of one runner's jail.
func FuzzJail(f *testing.F) {
	f.Add("edge-1/n")
	f.Add(">/n")
	f.Add("a.b/n")
	f.Add("*")
	f.Add("")
	f.Fuzz(func(t *testing.T, name string) {
		v := jail(name, schemas.ErrPersonCannotEnrol(), jailTime)
		for _, subject := range append(v.subjects.Publish, v.subjects.Subscribe...) {
			part := strings.Split(strings.Replace(subject, "runbus.v1.*.runner.", "", 1), ".")
			end := part[1:]
			if strings.ContainsAny(part[0], "*> \t\r\n") || len(end) == 0 || end[0] != "hello" && end[0] != "inbox" {
				t.Errorf("%q gives %q", name, subject)
			}
		}
	})
}

// FuzzDecide feeds a client's foreign words to what decides on it. A client that signs with a known key gets the subjects
// of one runner of its tenant, or JAIL; any other one is refused.
func FuzzDecide(f *testing.F) {
	secret, public, err := schemas.NewServiceToken("acme")
	must(f, err)
	key, err := schemas.ParseServiceToken(secret)
	must(f, err)
	a := &Auth{log: slog.New(slog.DiscardHandler), now: time.Now, confirmed: time.Now, dir: newDirectory(slog.New(slog.DiscardHandler))}
	a.dir.public[public] = Key{ID: "sa-edge", Tenant: "acme", PublicKey: public, ExpiresAt: time.Now().Add(KeyLife)}
	none := func(schemas.RunnerRef) (string, bool) { return "", false }
	s := &callout{a: a, c: CalloutConfig{Bound: none, OpsPublic: "UOPS", OpsSysPublic: "UOPSSYS"}}

	f.Add("edge-1/n1", "UOPS", "sig", "rst1.x", "user", "pass")
	f.Add("a.b/n1", "", "", "", "rst1.", "rst1.")
	f.Add("*/n1", public, "", "x", "", "")
	f.Add(">", "", "", "", "", "")
	f.Fuzz(func(t *testing.T, name, nkey, sig, token, user, pass string) {
		req := &jwt.AuthorizationRequestClaims{}
		req.ClientInformation = jwt.ClientInformation{Kind: "Client", Nonce: "nonce"}
		req.ConnectOptions = jwt.ConnectOptions{Name: name, Nkey: nkey, SignedNonce: sig, Token: token, Username: user, Password: pass}
		if v := s.decide(req); v.refused == "" {
			t.Errorf("let in without a credential: %+v", v)
		}
		raw, err := key.Key.Sign([]byte("nonce"))
		must(t, err)
		req.ConnectOptions.Nkey, req.ConnectOptions.SignedNonce = public, base64.RawURLEncoding.EncodeToString(raw)
		v := s.decide(req)
		if v.refused != "" || v.place != placeRun && v.place != placeJail {
			t.Fatalf("a known key: %+v", v)
		}
		for _, subject := range append(v.subjects.Publish, v.subjects.Subscribe...) {
			runner, ok := strings.CutPrefix(subject, "runbus.v1.acme.runner.")
			if v.place == placeJail {
				runner, ok = strings.CutPrefix(subject, "runbus.v1.*.runner.")
			}
			runner, _, more := strings.Cut(runner, ".")
			if !ok || !more || runner == "" || strings.ContainsAny(runner, "*> \t\r\n") {
				t.Errorf("%q gives %q", name, subject)
			}
		}
	})
}
