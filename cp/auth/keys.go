package auth

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// MintKey makes a service-account key for the tenant of by and returns it with its token, which is not stored and can't be
// shown again (SPEC E4). It is valid for KeyLife. Only an ORG_ADMIN may (CodeForbidden). An empty, malformed or reserved
// name is CodeInvalid. A name that has a live key is CodeConflict; one whose key was revoked or expired may be used again.
func (a *Auth) MintKey(ctx context.Context, by Principal, name string) (Key, string, error) {
	return a.MintKeyFor(ctx, by, "", name)
}

// MintKeyFor is MintKey for a request that names a tenant: any but by's own is CodeForbidden. Empty means by's own.
func (a *Auth) MintKeyFor(ctx context.Context, by Principal, tenant, name string) (Key, string, error) {
	const action = "key.mint"
	subject := "key:" + keyIDPrefix + clip(name)
	if err := a.tenantAdmin(by, "mint service-account keys"); err != nil {
		return Key{}, "", a.refuse(by, action, subject, err)
	}
	if tenant != "" && tenant != by.Tenant {
		return Key{}, "", a.refuse(by, action, subject, schemas.Errorf(schemas.CodeForbidden,
			"an admin of the tenant %q can't mint a key for another tenant", by.Tenant))
	}
	if err := schemas.ValidName("key name", name); err != nil {
		return Key{}, "", a.refuse(by, action, subject, asError(err))
	}
	if a.countLive(by.Tenant) >= maxLiveKeys {
		return Key{}, "", a.refuse(by, action, subject, schemas.Errorf(schemas.CodeLimit,
			"the tenant has %d live service-account keys: that is the limit", maxLiveKeys).WithHint("revoke keys that are not used any more"))
	}
	token, public, err := schemas.NewServiceToken(by.Tenant)
	if err != nil {
		return Key{}, "", schemas.Wrap(schemas.CodeFailed, err, "the key could not be made")
	}
	now := a.now().UTC()
	key := Key{
		ID: keyIDPrefix + name, Name: name, Tenant: by.Tenant, PublicKey: public,
		CreatedAt: now, ExpiresAt: now.Add(KeyLife), CreatedBy: by.Actor(),
	}
	if err := a.addKey(ctx, key); err != nil {
		return Key{}, "", a.refuse(by, action, subject, err)
	}
	err = a.record(ctx, &runbusv1.AuditEvent{
		Tenant: key.Tenant, Actor: by.Actor(), Action: action, Subject: "key:" + key.ID, Outcome: "ok",
		Details: map[string]string{"publicKey": key.PublicKey, "expiresAt": key.ExpiresAt.Format(time.RFC3339)},
	})
	if err != nil {
		// Nobody was shown the secret half: take the name back, so that minting it again is not a conflict.
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if _, uerr := a.endKey(undo, key.Tenant, key.Name); uerr != nil {
			a.log.Error("a key that was never shown stays live", "key", key.ID, "tenant", key.Tenant, "error", uerr)
		}
		return Key{}, "", err
	}
	return key, token, nil
}

// addKey decides by compare-and-set that key is the live one of its name.
func (a *Auth) addKey(ctx context.Context, key Key) *schemas.Error {
	at := keyNameKey(key.Tenant, key.Name)
	for range casAttempts {
		row, err := a.keys.Get(ctx, at)
		missing := errors.Is(err, jetstream.ErrNotFound)
		if err != nil && !missing {
			return storeError(err)
		}
		if old, live := row.Value.live(a.now()); !missing && live {
			return schemas.Errorf(schemas.CodeConflict, "the tenant has a live service-account key %q", old.ID).
				WithHint("revoke it first (`runink key revoke " + old.ID + "`), or choose another name")
		}
		record := row.Value.with(key)
		var revision uint64
		if missing {
			record = keyRecord{Keys: []Key{key}}
			revision, err = a.keys.Create(ctx, at, record)
		} else {
			revision, err = a.keys.Update(ctx, at, record, row.Revision)
		}
		if errors.Is(err, jetstream.ErrLost) {
			continue
		}
		if err != nil {
			return storeError(err)
		}
		wrote(a.dir, at, record, revision)
		return nil
	}
	return storeError(jetstream.ErrLost)
}

// Keys lists the keys of by's tenant, live and ended ones, by name and age. Only an ORG_ADMIN may (CodeForbidden).
func (a *Auth) Keys(_ context.Context, by Principal) ([]Key, error) {
	if err := a.tenantAdmin(by, "list service-account keys"); err != nil {
		return nil, a.refuse(by, "key.list", "tenant:"+by.Tenant, err)
	}
	return a.dir.keysOf(by.Tenant), nil
}

// RevokeKey ends a key of by's tenant for good and returns it. First the credential ends, then it is recorded; every
// replica that sees it cuts the key's live connections. Revoking a key again changes nothing and is no error. Only an
// ORG_ADMIN may (CodeForbidden); an id that the tenant doesn't have is CodeNotFound.
func (a *Auth) RevokeKey(ctx context.Context, by Principal, id string) (Key, error) {
	const action = "key.revoke"
	subject := "key:" + clip(id)
	if err := a.tenantAdmin(by, "revoke service-account keys"); err != nil {
		return Key{}, a.refuse(by, action, subject, err)
	}
	notFound := schemas.Errorf(schemas.CodeNotFound, "the tenant has no service-account key %q", clip(id)).WithHint("`runink key list` shows them")
	name, ok := strings.CutPrefix(id, keyIDPrefix)
	if !ok || schemas.ValidName("key name", name) != nil {
		return Key{}, a.refuse(by, action, subject, notFound)
	}
	key, err := a.endKey(ctx, by.Tenant, name)
	if errors.Is(err, jetstream.ErrNotFound) {
		return Key{}, a.refuse(by, action, subject, notFound)
	}
	if err != nil {
		return Key{}, a.refuse(by, action, subject, storeError(err))
	}
	// Recorded for a repetition too: the first time may have ended between the change and its record.
	err = a.record(ctx, &runbusv1.AuditEvent{
		Tenant: key.Tenant, Actor: by.Actor(), Action: action, Subject: subject, Outcome: "ok",
		Details: map[string]string{"publicKey": key.PublicKey, "revokedAt": key.RevokedAt.Format(time.RFC3339)},
	})
	return key, err
}

// endKey marks the newest key of a name as revoked, if it is not already, and returns it.
func (a *Auth) endKey(ctx context.Context, tenant, name string) (Key, error) {
	at := keyNameKey(tenant, name)
	for range casAttempts {
		row, err := a.keys.Get(ctx, at)
		if err != nil {
			return Key{}, err
		}
		keys := slices.Clone(row.Value.Keys)
		if len(keys) == 0 {
			return Key{}, jetstream.ErrNotFound
		}
		last := &keys[len(keys)-1]
		if last.RevokedAt != nil {
			wrote(a.dir, at, row.Value, row.Revision)
			return *last, nil
		}
		now := a.now().UTC()
		last.RevokedAt = &now
		record := keyRecord{Keys: keys}
		revision, err := a.keys.Update(ctx, at, record, row.Revision)
		if errors.Is(err, jetstream.ErrLost) {
			continue
		}
		if err != nil {
			return Key{}, err
		}
		wrote(a.dir, at, record, revision)
		return *last, nil
	}
	return Key{}, jetstream.ErrLost
}

// KeyByPublic returns the live key with that public half, from the view. A revoked key is schemas.ErrKeyRevoked, an
// expired one schemas.ErrKeyExpired, each returned together with the key; an unknown one is CodeUnauthorized.
func (a *Auth) KeyByPublic(public string) (Key, error) {
	key, ok := a.dir.byPublic(public)
	if !ok {
		return Key{}, &schemas.Error{Code: schemas.CodeUnauthorized, Message: "the service-account key is not known", Hint: "mint one with `runink key create NAME`"}
	}
	if key.RevokedAt != nil {
		return key, schemas.ErrKeyRevoked(key.ID)
	}
	if a.Expired(key.ExpiresAt) {
		return key, schemas.ErrKeyExpired(key.ID)
	}
	return key, nil
}

// KeyChanges counts the changes of keys in the view: as long as it says the same, KeyByPublic returns the same, but for Expired.
func (a *Auth) KeyChanges() uint64 { return a.dir.changes.Load() }

// Expired reports whether a key that ends at this time has, by the clock of KeyByPublic.
func (a *Auth) Expired(end time.Time) bool { return !a.now().Before(end) }

// RealTime reports whether that clock is time.Now.
func (a *Auth) RealTime() bool { return a.real }

// OnKeyRevoked has fn called for every revocation that this replica sees from now on, wherever it was made, once a key.
// fn must not block; it may run concurrently with itself.
func (a *Auth) OnKeyRevoked(fn func(Key)) { a.dir.subscribeRevoked(fn) }

func (a *Auth) countLive(tenant string) int {
	n, now := 0, a.now()
	for _, k := range a.dir.keysOf(tenant) {
		if k.RevokedAt == nil && now.Before(k.ExpiresAt) {
			n++
		}
	}
	return n
}

// asError is err as a *schemas.Error.
func asError(err error) *schemas.Error {
	var e *schemas.Error
	if errors.As(err, &e) {
		return e
	}
	return schemas.Wrap(schemas.CodeFailed, err, "internal error")
}

// clip shortens foreign text for an error or an audit event.
func clip(s string) string {
	if schemas.IsCredential(s) {
		return "(a token)"
	}
	const most = 80
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}
