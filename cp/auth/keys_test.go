package auth

import (
	"bytes"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
)

func TestOnlyAnAdminMintsForTheirOwnTenant(t *testing.T) {
	e := newEnv(t)
	admin, _ := e.tenant(t, "acme")
	e.tenant(t, "other")
	as := func(role Role, tenant string) Principal { return Principal{Tenant: tenant, Name: "ann", Role: role} }
	for _, c := range []struct {
		what         string
		by           Principal
		tenant, name string
		code         schemas.Code
		text         string
	}{
		{"reader", as(RoleReader, "acme"), "", "edge", schemas.CodeForbidden, "a READER may only list: to mint service-account keys takes an ORG_ADMIN of the tenant"},
		{"writer", as(RoleWriter, "acme"), "", "edge", schemas.CodeForbidden, "a WRITER may list and run fetches: to mint service-account keys takes an ORG_ADMIN of the tenant"},
		{"operator", e.operator, "", "edge", schemas.CodeForbidden, "the platform's operator belongs to no tenant: to mint service-account keys takes an ORG_ADMIN of the tenant"},
		{"operator, named tenant", e.operator, "acme", "edge", schemas.CodeForbidden, "the platform's operator belongs to no tenant: to mint service-account keys takes an ORG_ADMIN of the tenant"},
		{"nobody", Principal{}, "", "edge", schemas.CodeUnauthorized, "who is not signed in with a known role may not mint service-account keys"},
		{"admin of nothing", as(RoleOrgAdmin, ""), "", "edge", schemas.CodeUnauthorized, "who is not signed in to a tenant may not mint service-account keys"},
		{"admin of no such tenant", as(RoleOrgAdmin, "ghost"), "", "edge", schemas.CodeForbidden, `the tenant "ghost" does not exist`},
		{"another tenant", admin, "other", "edge", schemas.CodeForbidden, `an admin of the tenant "acme" can't mint a key for another tenant`},
		{"no name", admin, "", "", schemas.CodeInvalid, "the key name is empty: use a DNS label (1-63 of a-z 0-9 -)"},
		{"admin", admin, "", "admin", schemas.CodeInvalid, `the key name "admin" is reserved`},
		{"root", admin, "", "root", schemas.CodeInvalid, `the key name "root" is reserved`},
		{"system", admin, "", "system", schemas.CodeInvalid, `the key name "system" is reserved`},
		{"console", admin, "", "console", schemas.CodeInvalid, `the key name "console" is reserved`},
		{"upper case", admin, "", "Edge", schemas.CodeInvalid, `the key name "Edge" is not a DNS label (1-63 of a-z 0-9 -, not starting or ending with -)`},
		{"a dot", admin, "", "a.b", schemas.CodeInvalid, `the key name "a.b" is not a DNS label (1-63 of a-z 0-9 -, not starting or ending with -)`},
	} {
		t.Run(c.what, func(t *testing.T) {
			_, token, err := e.auth.MintKeyFor(t.Context(), c.by, c.tenant, c.name)
			wantError(t, err, c.code, c.text)
			if token != "" {
				t.Error("a refusal came with a token")
			}
		})
	}
	if keys, err := e.auth.Keys(t.Context(), admin); err != nil || len(keys) != 0 {
		t.Errorf("after refusals there are keys: %v, %v", keys, err)
	}

	key, token, err := e.auth.MintKeyFor(t.Context(), admin, "acme", "edge")
	must(t, err)
	if key.ID != "sa-edge" || key.Tenant != "acme" || key.CreatedBy != "person:owner" || key.RevokedAt != nil {
		t.Errorf("key = %+v", key)
	}
	if life := key.ExpiresAt.Sub(key.CreatedAt); life != 365*24*time.Hour {
		t.Errorf("life = %v", life)
	}
	secret, err := schemas.ParseServiceToken(token)
	must(t, err)
	public, err := secret.Key.PublicKey()
	must(t, err)
	if secret.Tenant != "acme" || public != key.PublicKey {
		t.Errorf("the token is of %q, %s", secret.Tenant, public)
	}
}

func TestKeysOfAnotherTenantAreNotThere(t *testing.T) {
	e := newEnv(t)
	acme, _ := e.tenant(t, "acme")
	other, _ := e.tenant(t, "acme-2")
	e.key(t, acme, "edge")
	if keys, err := e.auth.Keys(t.Context(), other); err != nil || len(keys) != 0 {
		t.Errorf("acme-2 sees %v, %v", keys, err)
	}
	_, err := e.auth.RevokeKey(t.Context(), other, "sa-edge")
	wantError(t, err, schemas.CodeNotFound, `the tenant has no service-account key "sa-edge"`)
	for _, id := range []string{"", "edge", "sa-", "sa-*", "sa-edge.x", "sa->"} {
		if _, err := e.auth.RevokeKey(t.Context(), acme, id); schemas.CodeOf(err) != schemas.CodeNotFound {
			t.Errorf("revoke %q: %v", id, err)
		}
	}
	for _, role := range []Role{RoleReader, RoleWriter, RoleOperator} {
		by := Principal{Tenant: "acme", Name: "ann", Role: role}
		if _, err := e.auth.Keys(t.Context(), by); schemas.CodeOf(err) != schemas.CodeForbidden {
			t.Errorf("%s lists keys: %v", role, err)
		}
		if _, err := e.auth.RevokeKey(t.Context(), by, "sa-edge"); schemas.CodeOf(err) != schemas.CodeForbidden {
			t.Errorf("%s revokes: %v", role, err)
		}
	}
	if keys, err := e.auth.Keys(t.Context(), acme); err != nil || len(keys) != 1 || keys[0].RevokedAt != nil {
		t.Errorf("acme sees %v, %v", keys, err)
	}
}

func TestANameHasOneLiveKey(t *testing.T) {
	e := newEnv(t)
	admin, _ := e.tenant(t, "acme")
	const writers = 8
	var wg sync.WaitGroup
	errs := make([]error, writers)
	replicas := [2]*Auth{e.auth, e.newAuth(t)}
	for i := range writers {
		wg.Go(func() { _, _, errs[i] = replicas[i%2].MintKey(t.Context(), admin, "edge") })
	}
	wg.Wait()
	won := 0
	for _, err := range errs {
		if err == nil {
			won++
			continue
		}
		wantError(t, err, schemas.CodeConflict, `the tenant has a live service-account key "sa-edge"`)
		var refused *schemas.Error
		if errors.As(err, &refused) && refused.Hint != "revoke it first (`runink key revoke sa-edge`), or choose another name" {
			t.Errorf("hint = %q", refused.Hint)
		}
	}
	if won != 1 {
		t.Fatalf("%d of %d mints of one name won", won, writers)
	}
	rows, err := e.auth.keys.Get(t.Context(), keyNameKey("acme", "edge"))
	if err != nil || len(rows.Value.Keys) != 1 {
		t.Errorf("stored: %+v, %v", rows.Value, err)
	}
}

func TestARevokedOrExpiredNameIsMintedAgain(t *testing.T) {
	e := newEnv(t)
	admin, _ := e.tenant(t, "acme")
	first, _ := e.key(t, admin, "edge")
	revoked, err := e.auth.RevokeKey(t.Context(), admin, "sa-edge")
	must(t, err)
	if revoked.PublicKey != first.PublicKey || revoked.RevokedAt == nil {
		t.Fatalf("revoked = %+v", revoked)
	}
	again, err := e.auth.RevokeKey(t.Context(), admin, "sa-edge")
	must(t, err)
	if !again.RevokedAt.Equal(*revoked.RevokedAt) {
		t.Errorf("revoking again moved the time from %v to %v", revoked.RevokedAt, again.RevokedAt)
	}
	second, _ := e.key(t, admin, "edge")
	e.clock.set(KeyLife + time.Minute)
	third, _ := e.key(t, admin, "edge")

	_, err = e.auth.KeyByPublic(first.PublicKey)
	wantError(t, err, schemas.CodeForbidden, `the service-account key "sa-edge" was revoked`)
	_, err = e.auth.KeyByPublic(second.PublicKey)
	wantError(t, err, schemas.CodeForbidden, `the service-account key "sa-edge" has expired`)
	if k, err := e.auth.KeyByPublic(third.PublicKey); err != nil || k.PublicKey != third.PublicKey {
		t.Errorf("the live key: %+v, %v", k, err)
	}
	_, err = e.auth.KeyByPublic("UNKNOWN")
	wantError(t, err, schemas.CodeUnauthorized, "the service-account key is not known")
	keys, err := e.auth.Keys(t.Context(), admin)
	if err != nil || len(keys) != 3 || keys[2].PublicKey != third.PublicKey {
		t.Errorf("keys = %v, %v", keys, err)
	}
}

func TestEveryReplicaSeesARevocationOnce(t *testing.T) {
	e := newEnv(t)
	admin, _ := e.tenant(t, "acme")
	key, _ := e.key(t, admin, "edge")
	there := e.newAuth(t)
	seen := make(chan Key, 10)
	there.OnKeyRevoked(func(k Key) { seen <- k })
	here := make(chan Key, 10)
	e.auth.OnKeyRevoked(func(k Key) { here <- k })
	for range 2 {
		_, err := e.auth.RevokeKey(t.Context(), admin, key.ID)
		must(t, err)
	}
	if k := wait(t, "the revocation at the other replica", seen); k.PublicKey != key.PublicKey || k.RevokedAt == nil {
		t.Errorf("seen: %+v", k)
	}
	wait(t, "the revocation here", here)
	// What comes next, there as here, is the next revocation and not the same one again.
	next, _ := e.key(t, admin, "next")
	_, err := e.auth.RevokeKey(t.Context(), admin, next.ID)
	must(t, err)
	if k := wait(t, "the next revocation", seen); k.PublicKey != next.PublicKey {
		t.Errorf("seen twice: %+v", k)
	}
	if k := wait(t, "the next revocation here", here); k.PublicKey != next.PublicKey {
		t.Errorf("seen twice here: %+v", k)
	}
}

func TestAMintThatCantBeRecordedIsTakenBack(t *testing.T) {
	e := newEnv(t)
	admin, _ := e.tenant(t, "acme")
	e.auth.audit = deadAudit(t, e)
	_, token, err := e.auth.MintKey(t.Context(), admin, "edge")
	if schemas.CodeOf(err) != schemas.CodeUnavailable || token != "" {
		t.Fatalf("mint without an audit log: token shown %t, %v", token != "", err)
	}
	e.auth.audit = e.audit
	if _, _, err := e.auth.MintKey(t.Context(), admin, "edge"); err != nil {
		t.Errorf("the name is not free again: %v", err)
	}
}

func TestNoSecretIsStored(t *testing.T) {
	e := newEnv(t)
	admin, ownerToken := e.tenant(t, "acme")
	_, keyToken, err := e.auth.MintKey(t.Context(), admin, "edge")
	must(t, err)
	personToken, err := e.auth.CreatePerson(t.Context(), admin, "ann", RoleReader)
	must(t, err)
	renewed, err := e.auth.NewSession(t.Context(), admin, "ann")
	must(t, err)
	secrets := []string{
		ownerToken, keyToken, personToken, renewed, strings.TrimPrefix(keyToken, "rsk1.acme."),
		strings.TrimPrefix(ownerToken, "rst1."), strings.TrimPrefix(personToken, "rst1."),
	}
	check := func(where string, body []byte) {
		for _, s := range secrets {
			if bytes.Contains(body, []byte(s)) {
				t.Errorf("%s holds a secret", where)
			}
		}
	}
	rows, err := jetstream.TableOf[record](e.store, jetstream.Identities).List(t.Context())
	must(t, err)
	for _, row := range rows {
		check(row.Key, append([]byte(row.Key), row.Value...))
	}
	events := 0
	must(t, e.store.ReadAudit(t.Context(), 1, func(_ uint64, body []byte) error {
		events++
		check("the audit log", body)
		return nil
	}))
	if len(rows) < 5 || events == 0 {
		t.Errorf("looked at %d rows and %d audit batches", len(rows), events)
	}
}

func TestChangesAreAuditedBeforeTheyAreAcknowledged(t *testing.T) {
	e := newEnv(t)
	admin, _ := e.tenant(t, "acme")
	last := func() (action, actor, subject, outcome string) {
		events, err := e.audit.List(t.Context(), "acme", 1)
		must(t, err)
		if len(events) != 1 {
			t.Fatalf("%d events", len(events))
		}
		ev := events[0]
		return ev.GetAction(), ev.GetActor(), ev.GetSubject(), ev.GetOutcome()
	}
	for _, c := range []struct {
		do              func() error
		action, subject string
		actor           string
	}{
		{func() error { return nil }, "tenant.create", "tenant:acme", "operator"},
		{func() error { _, _, err := e.auth.MintKey(t.Context(), admin, "edge"); return err }, "key.mint", "key:sa-edge", "person:owner"},
		{func() error { _, err := e.auth.RevokeKey(t.Context(), admin, "sa-edge"); return err }, "key.revoke", "key:sa-edge", "person:owner"},
		{func() error { _, err := e.auth.CreatePerson(t.Context(), admin, "ann", RoleWriter); return err }, "person.create", "person:ann", "person:owner"},
		{func() error { _, err := e.auth.NewSession(t.Context(), admin, "ann"); return err }, "session.create", "person:ann", "person:owner"},
		{func() error { return e.auth.RemovePerson(t.Context(), admin, "ann") }, "person.remove", "person:ann", "person:owner"},
	} {
		must(t, c.do())
		if action, actor, subject, outcome := last(); action != c.action || actor != c.actor || subject != c.subject || outcome != "ok" {
			t.Errorf("last event = %s by %s of %s: %s, want %s of %s", action, actor, subject, outcome, c.action, c.subject)
		}
	}
}

func TestARecordKeepsABoundedHistory(t *testing.T) {
	var r keyRecord
	for i := range 3 * maxKeyHistory {
		r = r.with(Key{PublicKey: strings.Repeat("x", i+1)})
	}
	if len(r.Keys) != maxKeyHistory+1 || len(r.Keys[maxKeyHistory].PublicKey) != 3*maxKeyHistory {
		t.Errorf("%d keys, the last one is number %d", len(r.Keys), len(r.Keys[len(r.Keys)-1].PublicKey))
	}
}
