package auth

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/org-runink/runbus/schemas"
)

func TestTenantsAreTheOperators(t *testing.T) {
	e := newEnv(t)
	before := e.clock.Now()
	admin, token := e.tenant(t, "acme")
	if admin.Tenant != "acme" || admin.Name != OwnerName || admin.Role != RoleOrgAdmin || !strings.HasPrefix(token, "rst1.") {
		t.Errorf("first admin = %+v", admin)
	}
	if end := admin.ExpiresAt; end.Before(before.Add(SessionLife)) || end.After(e.clock.Now().Add(SessionLife)) {
		t.Errorf("the session that began between %v and now ends at %v", before, end)
	}
	for name, code := range map[string]schemas.Code{
		"acme": schemas.CodeConflict, "": schemas.CodeInvalid, "admin": schemas.CodeInvalid, "none": schemas.CodeInvalid,
		"Acme": schemas.CodeInvalid, "a.b": schemas.CodeInvalid, "*": schemas.CodeInvalid, ">": schemas.CodeInvalid,
	} {
		if _, err := e.auth.CreateTenant(t.Context(), e.operator, name); schemas.CodeOf(err) != code {
			t.Errorf("create tenant %q: %v, want %s", name, err, code)
		}
	}
	_, err := e.auth.CreateTenant(t.Context(), admin, "mine")
	wantError(t, err, schemas.CodeForbidden, "only the platform's operator may create tenants")
	_, err = e.auth.CreateTenant(t.Context(), Principal{}, "mine")
	wantError(t, err, schemas.CodeUnauthorized, "who is not signed in may not create tenants")
	_, err = e.auth.Tenants(t.Context(), admin)
	wantError(t, err, schemas.CodeForbidden, "only the platform's operator may list tenants")
	e.tenant(t, "zeta")
	tenants, err := e.auth.Tenants(t.Context(), e.operator)
	if err != nil || len(tenants) != 2 || tenants[0].Name != "acme" || tenants[1].Name != "zeta" || tenants[0].CreatedBy != "operator" {
		t.Errorf("tenants = %+v, %v", tenants, err)
	}
}

func TestATenantIsMadeOnce(t *testing.T) {
	e := newEnv(t)
	replicas := [2]*Auth{e.auth, e.newAuth(t)}
	var wg sync.WaitGroup
	errs := make([]error, 6)
	for i := range errs {
		wg.Go(func() { _, errs[i] = replicas[i%2].CreateTenant(t.Context(), e.operator, "acme") })
	}
	wg.Wait()
	made := 0
	for _, err := range errs {
		if err == nil {
			made++
		} else if schemas.CodeOf(err) != schemas.CodeConflict {
			t.Errorf("error = %v", err)
		}
	}
	if made != 1 {
		t.Errorf("%d of %d made the tenant", made, len(errs))
	}
}

func TestATenantWithoutAnAdminIsCompleted(t *testing.T) {
	e := newEnv(t)
	must(t, e.auth.addTenant(t.Context(), "acme", "operator")) // and the call was cut off here
	admin, _ := e.tenant(t, "acme")
	if admin.Role != RoleOrgAdmin {
		t.Errorf("admin = %+v", admin)
	}
}

func TestPeople(t *testing.T) {
	e := newEnv(t)
	admin, _ := e.tenant(t, "acme")
	e.tenant(t, "other")
	tokens := map[Role]string{}
	for name, role := range map[string]Role{"rita": RoleReader, "walt": RoleWriter, "anna": RoleOrgAdmin} {
		token, err := e.auth.CreatePerson(t.Context(), admin, name, role)
		must(t, err)
		tokens[role] = token
		p, err := e.auth.Authenticate(token)
		must(t, err)
		if p.Tenant != "acme" || p.Name != name || p.Role != role || p.Actor() != "person:"+name {
			t.Errorf("principal = %+v", p)
		}
	}
	for _, c := range []struct {
		name string
		role Role
		code schemas.Code
	}{
		{"rita", RoleReader, schemas.CodeConflict}, {"", RoleReader, schemas.CodeInvalid}, {"root", RoleReader, schemas.CodeInvalid},
		{"x y", RoleReader, schemas.CodeInvalid}, {"olga", RoleOperator, schemas.CodeInvalid}, {"olga", "reader", schemas.CodeInvalid}, {"olga", "", schemas.CodeInvalid},
	} {
		if _, err := e.auth.CreatePerson(t.Context(), admin, c.name, c.role); schemas.CodeOf(err) != c.code {
			t.Errorf("create %q as %q: %v, want %s", c.name, c.role, err, c.code)
		}
	}
	for _, role := range []Role{RoleReader, RoleWriter} {
		by, err := e.auth.Authenticate(tokens[role])
		must(t, err)
		for what, do := range map[string]func() error{
			"create":  func() error { _, err := e.auth.CreatePerson(t.Context(), by, "olga", RoleReader); return err },
			"list":    func() error { _, err := e.auth.People(t.Context(), by); return err },
			"remove":  func() error { return e.auth.RemovePerson(t.Context(), by, "anna") },
			"session": func() error { _, err := e.auth.NewSession(t.Context(), by, "anna"); return err },
		} {
			if err := do(); schemas.CodeOf(err) != schemas.CodeForbidden {
				t.Errorf("%s, %s people: %v", role, what, err)
			}
		}
	}
	people, err := e.auth.People(t.Context(), admin)
	must(t, err)
	var names []string
	for _, p := range people {
		names = append(names, p.Name)
	}
	if strings.Join(names, " ") != "anna owner rita walt" {
		t.Errorf("people = %v", names)
	}
}

func TestSessionsEnd(t *testing.T) {
	e := newEnv(t)
	admin, _ := e.tenant(t, "acme")
	first, err := e.auth.CreatePerson(t.Context(), admin, "rita", RoleReader)
	must(t, err)
	there := e.newAuth(t) // another replica

	second, err := e.auth.NewSession(t.Context(), admin, "rita")
	must(t, err)
	_, err = e.auth.Authenticate(first)
	wantError(t, err, schemas.CodeUnauthorized, "the session token is not valid")
	if _, err := e.auth.Authenticate(second); err != nil {
		t.Errorf("the new token: %v", err)
	}

	must(t, e.auth.RemovePerson(t.Context(), admin, "rita"))
	_, err = e.auth.Authenticate(second)
	wantError(t, err, schemas.CodeUnauthorized, "the session token is not valid")
	third, err := e.auth.CreatePerson(t.Context(), admin, "rita", RoleWriter)
	must(t, err)
	if _, err := e.auth.Authenticate(second); schemas.CodeOf(err) != schemas.CodeUnauthorized {
		t.Errorf("who comes again under an old name got the old session: %v", err)
	}

	// The other replica hears of all of it, in an order of its own when it reads the bucket anew: a state that is looked at again.
	hash, err := schemas.SessionTokenHash(third)
	must(t, err)
	for _, key := range []string{personKey("acme", "rita"), sessionKey(hash)} {
		for give := time.Now().Add(patience); there.dir.revision(key) != e.auth.dir.revision(key); <-time.After(5 * time.Millisecond) {
			if time.Now().After(give) {
				t.Fatalf("the other replica has %s at %d, not at %d", key, there.dir.revision(key), e.auth.dir.revision(key))
			}
		}
	}
	for token, want := range map[string]schemas.Code{first: schemas.CodeUnauthorized, second: schemas.CodeUnauthorized, third: ""} {
		if _, err := there.Authenticate(token); schemas.CodeOf(err) != want {
			t.Errorf("at the other replica: %v, want %q", err, want)
		}
	}

	e.clock.set(SessionLife + time.Second)
	_, err = e.auth.Authenticate(third)
	wantError(t, err, schemas.CodeUnauthorized, "the session has expired")

	for name, code := range map[string]schemas.Code{"owner": schemas.CodeConflict, "ghost": schemas.CodeNotFound, "": schemas.CodeNotFound, "*": schemas.CodeNotFound} {
		if err := e.auth.RemovePerson(t.Context(), admin, name); schemas.CodeOf(err) != code {
			t.Errorf("remove %q: %v, want %s", name, err, code)
		}
	}
}

func TestWhatIsNoSession(t *testing.T) {
	e := newEnv(t)
	admin, _ := e.tenant(t, "acme")
	_, token, err := e.auth.MintKey(t.Context(), admin, "edge")
	must(t, err)
	for _, s := range []string{"", "rst1.", "rst1.!!", "rst1." + strings.Repeat("A", 43), schemas.NewSessionToken(), token, "Bearer x"} {
		if _, err := e.auth.Authenticate(s); schemas.CodeOf(err) != schemas.CodeUnauthorized {
			t.Errorf("authenticated: %v", err)
		} else if s != "" && len(s) > 6 && strings.Contains(err.Error(), s) {
			t.Errorf("the error shows the token")
		}
	}
}

func TestDeadSessionsAreSwept(t *testing.T) {
	e := newEnv(t)
	admin, _ := e.tenant(t, "acme")
	for range 5 {
		_, err := e.auth.NewSession(t.Context(), admin, OwnerName)
		must(t, err)
	}
	e.clock.set(2 * time.Hour)
	must(t, func() error { _, err := e.auth.NewSession(t.Context(), admin, OwnerName); return err }())
	rows, err := e.auth.all.List(t.Context())
	must(t, err)
	sessions := 0
	for _, row := range rows {
		if strings.HasPrefix(row.Key, sessionPrefix) {
			sessions++
		}
	}
	if sessions != 2 { // the last one, and the one before: it was the live one when the sweep went over them
		t.Errorf("%d sessions are kept", sessions)
	}
}

func TestTokenFiles(t *testing.T) {
	e := newEnv(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "operator.token")
	read := func(file string) string {
		t.Helper()
		body, err := os.ReadFile(file)
		must(t, err)
		info, err := os.Stat(file)
		must(t, err)
		if info.Mode().Perm() != 0o600 {
			t.Errorf("mode = %v", info.Mode())
		}
		return strings.TrimSpace(string(body))
	}
	ensure := func() string {
		t.Helper()
		must(t, e.auth.EnsureOperator(t.Context(), file))
		token := read(file)
		p, err := e.auth.Authenticate(token)
		if err != nil || p.Role != RoleOperator || p.Tenant != "" || p.Actor() != "operator" {
			t.Fatalf("operator = %+v, %v", p, err)
		}
		return token
	}
	first := ensure()
	if ensure() != first {
		t.Error("a good file was not kept")
	}
	must(t, os.Chmod(file, 0o644))
	if ensure() != first {
		t.Error("a file with a wrong mode was not kept")
	}
	must(t, os.Remove(file))
	second := ensure()
	if _, err := e.auth.Authenticate(first); schemas.CodeOf(err) != schemas.CodeUnauthorized {
		t.Errorf("the lost token still works: %v", err)
	}
	must(t, os.WriteFile(file, []byte("garbage\n"), 0o600))
	third := ensure()
	if third == second {
		t.Error("a damaged file came back with an old token")
	}
	e.clock.set(FileSessionLife - FileSessionRenew + time.Hour)
	if ensure() == third {
		t.Error("a token that ends soon was kept")
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 {
		t.Errorf("left in the folder: %v, %v", left, err)
	}

	local := filepath.Join(dir, "local.token")
	must(t, e.auth.EnsureTenantAdmin(t.Context(), "local", OwnerName, local))
	admin, err := e.auth.Authenticate(read(local))
	if err != nil || admin.Tenant != "local" || admin.Name != OwnerName || admin.Role != RoleOrgAdmin {
		t.Fatalf("admin = %+v, %v", admin, err)
	}
	token := read(local)
	must(t, e.auth.EnsureTenantAdmin(t.Context(), "local", OwnerName, local))
	if read(local) != token {
		t.Error("a good file was not kept")
	}
	// The file of one is not the file of another.
	must(t, os.WriteFile(local, []byte(read(file)+"\n"), 0o600))
	must(t, e.auth.EnsureTenantAdmin(t.Context(), "local", OwnerName, local))
	if p, err := e.auth.Authenticate(read(local)); err != nil || p.Role != RoleOrgAdmin {
		t.Errorf("admin = %+v, %v", p, err)
	}
	if _, err := e.auth.CreatePerson(t.Context(), admin, "rita", RoleReader); err != nil {
		t.Fatal(err)
	}
	if err := e.auth.EnsureTenantAdmin(t.Context(), "local", "rita", filepath.Join(dir, "rita")); schemas.CodeOf(err) != schemas.CodeConflict {
		t.Errorf("a READER was made an admin: %v", err)
	}
	if err := e.auth.EnsureTenantAdmin(t.Context(), "a.b", OwnerName, local); schemas.CodeOf(err) != schemas.CodeInvalid {
		t.Errorf("tenant a.b: %v", err)
	}
	if err := e.auth.EnsureOperator(t.Context(), filepath.Join(dir, "missing", "x")); err == nil {
		t.Error("an unwritable folder is no error")
	}
}
