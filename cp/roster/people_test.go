package roster

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/schemas"
)

func TestCreate(t *testing.T) {
	e := start(t, nil)
	runner, minted, err := e.r.Create(t.Context(), e.ada, Spec{
		Name: "warehouse", Address: "[2001:DB8::1]:7443", Zone: "eu-1", Labels: map[string]string{"env": "prod"},
	})
	must(t, err)
	if runner.State != Pending || !schemas.IsDialledID(runner.ID) || runner.Address != "[2001:db8::1]:7443" || runner.CreatedBy != "person:ada" {
		t.Errorf("made %+v", runner)
	}
	if left := time.Until(minted.ExpiresAt); left < 14*time.Minute || left > 15*time.Minute {
		t.Errorf("the token is valid for %s", left)
	}
	for _, name := range []string{runner.ID, "warehouse"} {
		found, ok, err := e.r.Find(acme, name)
		if err != nil || !ok || found.ID != runner.ID || found.Labels["env"] != "prod" {
			t.Errorf("%s is %+v, %v, %v", name, found, ok, err)
		}
		if _, ok, err := e.r.Find(other, name); ok || err != nil {
			t.Errorf("another tenant has %s: %v", name, err)
		}
	}
	events := e.events(t, "runner.create")
	if len(events) != 1 || events[0].GetActor() != "person:ada" || events[0].GetSubject() != "runner:"+runner.ID || events[0].GetDetails()["address"] != runner.Address {
		t.Errorf("audited %v", events)
	}
	// Names are unique in a tenant only.
	_, _, err = e.r.Create(t.Context(), e.ada, spec("warehouse"))
	wantCode(t, "the name again", err, schemas.CodeConflict, `named "warehouse" already`)
	bob := auth.Principal{Tenant: other, Name: "bob", Role: auth.RoleWriter}
	if _, _, err := e.r.Create(t.Context(), bob, spec("warehouse")); err != nil {
		t.Errorf("the name in another tenant: %v", err)
	}
}

func TestWhatCreateRefuses(t *testing.T) {
	e := start(t, nil)
	token := schemas.NewSessionToken()
	nine := map[string]string{}
	for i := range 9 {
		nine[fmt.Sprint("l", i)] = ""
	}
	for what, c := range map[string]struct {
		spec Spec
		code schemas.Code
		text string
	}{
		"no name":         {Spec{Address: "h:1"}, schemas.CodeInvalid, "the runner name is empty"},
		"no label":        {spec("A_b"), schemas.CodeInvalid, "is not a DNS label"},
		"console":         {spec("console"), schemas.CodeInvalid, `"console" is reserved`},
		"an id":           {spec(schemas.NewRunnerID()), schemas.CodeInvalid, "has the form of an id"},
		"a token as name": {spec(token), schemas.CodeInvalid, "looks like a token"},
		"no address":      {Spec{Name: "x"}, schemas.CodeInvalid, "address"},
		"a URL":           {Spec{Name: "x", Address: "https://h:1"}, schemas.CodeInvalid, "scheme"},
		"cloud metadata":  {Spec{Name: "x", Address: "169.254.169.254:80"}, schemas.CodeInvalid, "the control plane dials no runner at 169.254.169.254: link-local"},
		"its name":        {Spec{Name: "x", Address: "metadata.google.internal:80"}, schemas.CodeInvalid, "the name of a cloud-metadata service"},
		"a token as zone": {Spec{Name: "x", Address: "h:1", Zone: "crt1.abc"}, schemas.CodeInvalid, "the zone looks like a token"},
		"a bad zone":      {Spec{Name: "x", Address: "h:1", Zone: "a b"}, schemas.CodeInvalid, "the zone is not"},
		"nine labels":     {Spec{Name: "x", Address: "h:1", Labels: nine}, schemas.CodeLimit, "at most 8 labels"},
		"a bad label":     {Spec{Name: "x", Address: "h:1", Labels: map[string]string{"a b": ""}}, schemas.CodeInvalid, "a label's name"},
		"a long label":    {Spec{Name: "x", Address: "h:1", Labels: map[string]string{"a": strings.Repeat("x", 129)}}, schemas.CodeInvalid, `the value of label "a"`},
		"a token a label": {Spec{Name: "x", Address: "h:1", Labels: map[string]string{"a": token}}, schemas.CodeInvalid, "a label looks like a token"},
	} {
		_, _, err := e.r.Create(t.Context(), e.ada, c.spec)
		wantCode(t, what, err, c.code, c.text)
		if strings.Contains(err.Error(), token) {
			t.Errorf("%s: the token is shown", what)
		}
	}
	if runners, err := e.r.All(); err != nil || len(runners) != 0 {
		t.Errorf("stored all the same: %v, %v", runners, err)
	}
}

func TestWhoMayChangeRunners(t *testing.T) {
	for what, c := range map[string]struct {
		admins []string
		by     auth.Principal
		code   schemas.Code // "": may
	}{
		"unset, admin":          {nil, auth.Principal{Tenant: acme, Name: "ada", Role: auth.RoleOrgAdmin}, ""},
		"unset, writer":         {nil, auth.Principal{Tenant: acme, Name: "wanda", Role: auth.RoleWriter}, ""},
		"unset, reader":         {nil, auth.Principal{Tenant: acme, Name: "rita", Role: auth.RoleReader}, schemas.CodeForbidden},
		"unset, operator":       {nil, auth.Principal{Name: "operator", Role: auth.RoleOperator}, schemas.CodeForbidden},
		"unset, nobody":         {nil, auth.Principal{}, schemas.CodeUnauthorized},
		"listed":                {[]string{"x", "wanda"}, auth.Principal{Tenant: acme, Name: "wanda", Role: auth.RoleWriter}, ""},
		"listed in the tenant":  {[]string{"acme/wanda"}, auth.Principal{Tenant: acme, Name: "wanda", Role: auth.RoleWriter}, ""},
		"listed in another":     {[]string{"other/wanda"}, auth.Principal{Tenant: acme, Name: "wanda", Role: auth.RoleWriter}, schemas.CodeForbidden},
		"not listed, admin":     {[]string{"wanda"}, auth.Principal{Tenant: acme, Name: "ada", Role: auth.RoleOrgAdmin}, schemas.CodeForbidden},
		"a listed reader still": {[]string{"rita"}, auth.Principal{Tenant: acme, Name: "rita", Role: auth.RoleReader}, schemas.CodeForbidden},
	} {
		r := &Roster{d: Deps{Admins: c.admins}}
		if err := r.Allowed(c.by); schemas.CodeOf(err) != c.code {
			t.Errorf("%s: %v, want %q", what, err, c.code)
		}
	}
	// A refusal is audited, and nothing was done.
	e := start(t, nil)
	runner, minted := e.create(t, "warehouse")
	reader := auth.Principal{Tenant: acme, Name: "rita", Role: auth.RoleReader}
	address := "elsewhere:1"
	for what, do := range map[string]func() error{
		"runner.create": func() error { _, _, err := e.r.Create(t.Context(), reader, spec("x")); return err },
		"runner.edit": func() error {
			_, err := e.r.Edit(t.Context(), reader, runner.ID, Change{Address: &address})
			return err
		},
		"runner.token":        func() error { _, _, err := e.r.Mint(t.Context(), reader, runner.ID); return err },
		"runner.token.revoke": func() error { return e.r.RevokeToken(t.Context(), reader, minted.TokenID) },
		"runner.revoke":       func() error { _, err := e.r.Revoke(t.Context(), reader, runner.ID); return err },
		"runner.remove":       func() error { return e.r.Remove(t.Context(), reader, runner.ID) },
	} {
		wantCode(t, what, do(), schemas.CodeForbidden, "a READER may only list")
	}
	if now := e.byID(t, runner.ID); !now.equal(runner) || !e.token(t, minted.TokenID).Live(time.Now()) {
		t.Errorf("changed all the same: %+v", now)
	}
	stranger := auth.Principal{Tenant: other, Name: "ada", Role: auth.RoleOrgAdmin}
	_, err := e.r.Revoke(t.Context(), stranger, runner.ID)
	wantCode(t, "another tenant's admin", err, schemas.CodeNotFound, "no dialled runner")
	wantCode(t, "another tenant's token", e.r.RevokeToken(t.Context(), stranger, minted.TokenID), schemas.CodeNotFound, "no enrolment token")
}

func TestConsoleIsNobodysToChange(t *testing.T) {
	e := start(t, nil)
	address := "h:1"
	_, err := e.r.Edit(t.Context(), e.ada, "console", Change{Address: &address})
	wantCode(t, "edit", err, schemas.CodeForbidden, "can't be changed")
	_, err = e.r.Revoke(t.Context(), e.ada, "console")
	wantCode(t, "revoke", err, schemas.CodeForbidden, "can't be changed")
	_, _, err = e.r.Mint(t.Context(), e.ada, "console")
	wantCode(t, "token", err, schemas.CodeForbidden, "can't be changed")
	wantCode(t, "remove", e.r.Remove(t.Context(), e.ada, "console"), schemas.CodeForbidden, "can't be changed")
}

func TestEdit(t *testing.T) {
	e := start(t, nil)
	runner, minted := e.create(t, "warehouse")
	set := func(s string) *string { return &s }
	// The address moves, and the ticket stays good.
	moved, err := e.r.Edit(t.Context(), e.ada, "warehouse", Change{Address: set("10.0.0.7:8443"), Name: set("store")})
	must(t, err)
	if moved.Address != "10.0.0.7:8443" || moved.Name != "store" || !e.token(t, minted.TokenID).Live(time.Now()) {
		t.Errorf("moved %+v", moved)
	}
	if _, ok, _ := e.r.Find(acme, "warehouse"); ok {
		t.Error("the old name still finds it")
	}
	events := e.events(t, "runner.edit")
	if d := events[len(events)-1].GetDetails(); d["oldAddress"] != runner.Address || d["address"] != moved.Address || d["oldName"] != "warehouse" {
		t.Errorf("audited %v", d)
	}
	// Zone or labels of a PENDING runner end it.
	for what, change := range map[string]Change{"zone": {Zone: set("eu-2")}, "labels": {Labels: &map[string]string{"a": "b"}}} {
		_, fresh, err := e.r.Mint(t.Context(), e.ada, runner.ID)
		must(t, err)
		_, err = e.r.Edit(t.Context(), e.ada, runner.ID, change)
		must(t, err)
		if token := e.token(t, fresh.TokenID); token.RevokedAt == nil {
			t.Errorf("%s: the token is live: %+v", what, token)
		}
		if _, _, _, err := e.r.Proof(t.Context(), runner.ID); !errors.Is(err, ErrNoProof) {
			t.Errorf("%s: proof: %v", what, err)
		}
		before := len(e.events(t, "runner.edit"))
		_, err = e.r.Edit(t.Context(), e.ada, runner.ID, change)
		must(t, err)
		if again := e.events(t, "runner.edit"); len(again) != before+1 || again[before].GetDetails()["revokedTokens"] != "" {
			t.Errorf("%s: the same again: %v", what, again)
		}
	}
	_, err = e.r.Edit(t.Context(), e.ada, runner.ID, Change{Address: set("user@h:1")})
	wantCode(t, "a bad address", err, schemas.CodeInvalid, "user")
	e.create(t, "taken")
	_, err = e.r.Edit(t.Context(), e.ada, runner.ID, Change{Name: set("taken")})
	wantCode(t, "a taken name", err, schemas.CodeConflict, "already")
}

func TestTokens(t *testing.T) {
	e := start(t, nil)
	runner, first := e.create(t, "warehouse")
	_, second, err := e.r.Mint(t.Context(), e.ada, "warehouse")
	must(t, err)
	if token := e.token(t, first.TokenID); token.RevokedAt == nil {
		t.Errorf("the first token is live: %+v", token)
	}
	_, _, err = e.r.Consume(t.Context(), claim(runner, first, "k"))
	if !errors.Is(err, ErrTokenEnded) {
		t.Errorf("the first token: %v", err)
	}
	must(t, e.r.RevokeToken(t.Context(), e.ada, second.TokenID))
	must(t, e.r.RevokeToken(t.Context(), e.ada, second.TokenID)) // again is no error
	if _, _, err := e.r.Consume(t.Context(), claim(runner, second, "k")); !errors.Is(err, ErrTokenEnded) {
		t.Errorf("the second token: %v", err)
	}
	_, third, err := e.r.Mint(t.Context(), e.ada, runner.ID)
	must(t, err)
	_, _, err = e.r.Consume(t.Context(), claim(runner, third, "k"))
	must(t, err)
	_, _, err = e.r.Mint(t.Context(), e.ada, runner.ID)
	wantCode(t, "a token for an ACTIVE runner", err, schemas.CodeConflict, "only a PENDING one")
	wantCode(t, "revoking a used token", e.r.RevokeToken(t.Context(), e.ada, third.TokenID), schemas.CodeConflict, "was used")

	// What has ended is kept for a day, and its certificate an hour.
	e.clock.advance(2 * time.Hour)
	e.create(t, "second")
	if token := e.token(t, third.TokenID); token.UsedAt == nil || token.Certificate != nil {
		t.Errorf("after two hours: %+v", token)
	}
	if _, _, err := e.r.Consume(t.Context(), claim(runner, third, "k")); !errors.Is(err, ErrTokenEnded) {
		t.Errorf("the certificate after two hours: %v", err)
	}
	e.clock.advance(23 * time.Hour)
	e.create(t, "third")
	for _, id := range []string{first.TokenID, second.TokenID, third.TokenID} {
		if token := e.token(t, id); token.ID != "" {
			t.Errorf("after a day: %+v", token)
		}
	}
}

func TestRevokeAndRemove(t *testing.T) {
	e := start(t, nil)
	runner := e.enrolled(t, "warehouse")
	must(t, e.r.SetNext(t.Context(), runner.ID, runner.Current.Fingerprint, leaf("next")))
	wantCode(t, "removing an ACTIVE one", e.r.Remove(t.Context(), e.ada, "warehouse"), schemas.CodeConflict, "only a REVOKED one")
	gone, err := e.r.Revoke(t.Context(), e.ada, "warehouse")
	must(t, err)
	if gone.State != Revoked || gone.RevokedAt == nil || gone.Next != nil {
		t.Errorf("revoked %+v", gone)
	}
	again, err := e.r.Revoke(t.Context(), e.ada, "warehouse")
	if err != nil || !again.RevokedAt.Equal(*gone.RevokedAt) {
		t.Errorf("again: %+v, %v", again, err)
	}
	address := "h:1"
	_, err = e.r.Edit(t.Context(), e.ada, runner.ID, Change{Address: &address})
	wantCode(t, "editing it", err, schemas.CodeRunnerRevoked, "was revoked")
	wantCode(t, "renewing it", e.r.SetNext(t.Context(), runner.ID, runner.Current.Fingerprint, leaf("x")), schemas.CodeRunnerRevoked, "was revoked")
	_, _, _, err = e.r.Proof(t.Context(), runner.ID)
	wantCode(t, "its proof", err, schemas.CodeRunnerRevoked, "was revoked")
	_, _, err = e.r.Create(t.Context(), e.ada, spec("warehouse"))
	wantCode(t, "its name", err, schemas.CodeConflict, "already")
	must(t, e.r.Remove(t.Context(), e.ada, "warehouse"))
	if _, ok, err := e.r.ByID(runner.ID); ok || err != nil {
		t.Errorf("it is still there: %v", err)
	}
	e.create(t, "warehouse")
}

// A session token that somebody writes in the place of a runner is refused, and does not get into the audit (SPEC R8).
func TestATokenInThePlaceOfARunner(t *testing.T) {
	e := start(t, nil)
	token := schemas.NewSessionToken()
	_, err := e.r.Revoke(t.Context(), e.ada, token)
	wantCode(t, "revoke", err, schemas.CodeInvalid, "not a runner name")
	_, _, err = e.r.Mint(t.Context(), e.ada, token)
	wantCode(t, "mint", err, schemas.CodeInvalid, "not a runner name")
	e.create(t, "last") // is recorded behind them
	noted := append(e.events(t, "runner.revoke"), e.events(t, "runner.token")...)
	if len(noted) != 2 {
		t.Errorf("audited %v", noted)
	}
	for _, event := range noted {
		if strings.Contains(event.String(), token) {
			t.Error("the token is in the audit")
		}
	}
}

// A token is nowhere but in what Create returned: not in a bucket, not in the audit (SPEC C3).
func TestNoTokenIsStored(t *testing.T) {
	e := start(t, nil)
	runner, minted := e.create(t, "warehouse")
	js, err := natsjs.New(e.Conn(t, embedded.UserSec))
	must(t, err)
	key := schemas.EnrolmentKey(minted.Token, runner.ID)
	seen, proofs := 0, 0
	for name := range js.StreamNames(t.Context()).Name() {
		stream, err := js.Stream(t.Context(), name)
		must(t, err)
		for seq := uint64(1); seq <= stream.CachedInfo().State.LastSeq; seq++ {
			m, err := stream.GetMsg(t.Context(), seq)
			if errors.Is(err, natsjs.ErrMsgNotFound) {
				continue
			}
			must(t, err)
			seen++
			for what, secret := range map[string][]byte{"token": minted.Token[:], "proof key": key[:]} {
				forms := [][]byte{
					secret, []byte(hex.EncodeToString(secret)), []byte(base64.StdEncoding.EncodeToString(secret)), []byte(base64.RawURLEncoding.EncodeToString(secret)),
				}
				switch {
				case !slices.ContainsFunc(forms, func(form []byte) bool { return bytes.Contains(m.Data, form) }):
				case what == "proof key" && name == "KV_runbus_proofs":
					proofs++
				default:
					t.Errorf("the %s is in %s", what, name)
				}
			}
		}
	}
	if seen < 3 || proofs != 1 {
		t.Errorf("%d messages were looked at, and the proof key is in %d", seen, proofs)
	}
}
