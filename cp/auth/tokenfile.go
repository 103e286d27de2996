package auth

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/org-runink/runbus/internal/durable"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// EnsureOperator sees to it that tokenFile (0600) holds a session token of the platform's operator. At the first start it
// makes the operator and the file; later it keeps a file whose token is valid for at least FileSessionRenew. A file that
// is lost, damaged or stale is made again with a new token, and the operator's old sessions end with that: who can write
// the data folder is the operator. It waits for the audit log, so audit.Log.Run must run.
func (a *Auth) EnsureOperator(ctx context.Context, tokenFile string) error {
	return a.ensureFile(ctx, personRecord{Name: operatorName, Role: RoleOperator}, tokenFile)
}

// EnsureTenantAdmin does the same for a tenant and one admin of it: both are made when they are missing. A person of that
// name who is there already must be an ORG_ADMIN (CodeConflict).
func (a *Auth) EnsureTenantAdmin(ctx context.Context, tenant, person, tokenFile string) error {
	if err := schemas.ValidTenant(tenant); err != nil {
		return err
	}
	if err := schemas.ValidName("name of the person", person); err != nil {
		return err
	}
	t := tenantRecord{Name: tenant, CreatedAt: a.now().UTC(), CreatedBy: "control-plane"}
	revision, err := a.tenants.Create(ctx, tenantKey(tenant), t)
	switch {
	case err == nil:
		wrote(a.dir, tenantKey(tenant), t, revision)
		err = a.record(ctx, &runbusv1.AuditEvent{
			Tenant: tenant, Actor: "control-plane", Action: "tenant.create", Subject: "tenant:" + tenant, Outcome: "ok",
		})
		if err != nil {
			return err
		}
	case !errors.Is(err, jetstream.ErrLost): // lost: it is there
		return storeError(err)
	}
	return a.ensureFile(ctx, personRecord{Tenant: tenant, Name: person, Role: RoleOrgAdmin}, tokenFile)
}

// ensureFile makes want's record, session and token file, as far as they are missing.
func (a *Auth) ensureFile(ctx context.Context, want personRecord, file string) error {
	row, err := a.people.Get(ctx, want.key())
	missing := errors.Is(err, jetstream.ErrNotFound)
	if err != nil && !missing {
		return storeError(err)
	}
	if !missing && row.Value.Role != want.Role {
		return schemas.Errorf(schemas.CodeConflict, "the person %q of the tenant %q is a %s, not an %s", want.Name, want.Tenant, row.Value.Role, want.Role)
	}
	keep, err := a.keepsFile(want, file)
	if err != nil {
		return err
	}
	if !missing && keep {
		return nil
	}
	var token string
	var rerr *schemas.Error
	if missing {
		person := a.newPerson(want.Tenant, want.Name, want.Role, "control-plane")
		token, rerr = a.addPerson(ctx, person, FileSessionLife)
	} else {
		token, rerr = a.renew(ctx, row, FileSessionLife)
	}
	if rerr != nil {
		return rerr
	}
	subject := operatorName
	if want.Role != RoleOperator {
		subject = "person:" + want.Name
	}
	err = a.record(ctx, &runbusv1.AuditEvent{
		Tenant: want.Tenant, Actor: "control-plane", Action: "session.create", Subject: subject, Outcome: "ok",
		Details: map[string]string{"to": "token file"},
	})
	if err != nil {
		return err
	}
	if err := durable.Replace(file, []byte(token+"\n"), nil); err != nil {
		return fmt.Errorf("token file: %w", err)
	}
	return nil
}

// keepsFile reports whether file holds a token of want that will do for a while. A file that others may read is made
// private again.
func (a *Auth) keepsFile(want personRecord, file string) (bool, error) {
	body, err := readPrivate(file)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	p, err := a.Authenticate(strings.TrimSpace(string(body)))
	// A token that is not valid is no failure: the file is stale.
	good := err == nil && p.Tenant == want.Tenant && p.Name == want.Name && p.Role == want.Role
	return good && p.ExpiresAt.Sub(a.now()) >= FileSessionRenew, nil
}

// readPrivate reads a small regular file and takes away what others may do with it.
func readPrivate(file string) ([]byte, error) {
	info, err := os.Lstat(file)
	if err != nil {
		return nil, fmt.Errorf("token file: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("token file %s is not a regular file", file)
	}
	if info.Mode().Perm()&0o077 != 0 {
		if err := os.Chmod(file, 0o600); err != nil {
			return nil, fmt.Errorf("token file: %w", err)
		}
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("token file: %w", err)
	}
	defer func() { _ = f.Close() }()
	body, err := io.ReadAll(io.LimitReader(f, 4096))
	if err != nil {
		return nil, fmt.Errorf("token file: %w", err)
	}
	return body, nil
}
