package api

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/dispatch"
	"github.com/org-runink/runbus/schemas"
)

type list[T any] struct {
	Body []T
}

// listOf never answers null for an empty list.
func listOf[T any](items []T, err error) (*list[T], error) {
	if err != nil {
		return nil, problemOf(err)
	}
	if items == nil {
		items = []T{}
	}
	return &list[T]{Body: items}, nil
}

// inTenant refuses the platform's operator what belongs to a tenant.
func inTenant(p auth.Principal) error {
	if p.Tenant == "" {
		return problemOf(errNoTenant())
	}
	return nil
}

func errNoTenant() error {
	return schemas.Errorf(schemas.CodeForbidden, "the platform's operator has no tenant: use a person's session").
		WithHint("the operator creates tenants; their admins and people do the rest")
}

func (s *server) listRunning(ctx context.Context, _ *struct{}) (*list[dispatch.Running], error) {
	p := principal(ctx)
	if err := inTenant(p); err != nil {
		return nil, err
	}
	return listOf(s.Dispatch.Running(p.Tenant), nil)
}

type dispatchID struct {
	ID string `path:"dispatchId" doc:"From the header Runbus-Dispatch-Id" maxLength:"64"`
}

func (s *server) cancelFetch(ctx context.Context, in *dispatchID) (*struct{}, error) {
	by := principal(ctx)
	err := s.Dispatch.Cancel(by, in.ID)
	if err == nil || schemas.CodeOf(err) == schemas.CodeNotFound && s.cancelEarly(by, in.ID) {
		return nil, nil
	}
	return nil, s.refused(by, "dispatch.cancel", "dispatch", in.ID, err)
}

func (s *server) listKeys(ctx context.Context, _ *struct{}) (*list[auth.Key], error) {
	return listOf(s.Auth.Keys(ctx, principal(ctx)))
}

type mintKeyInput struct {
	Body struct {
		Name   string `json:"name" doc:"DNS label; the key's id is sa-<name>" example:"edge"`
		Tenant string `json:"tenant,omitempty" doc:"May only be the caller's own, which is the default"`
	}
}

// MintedKey is a new key with its token.
type MintedKey struct {
	auth.Key
	Token string `json:"token" doc:"Service-account token (RUNNER_ENROLL_TOKEN). It is shown this once and not stored"`
}

type mintKeyOutput struct{ Body MintedKey }

// mintKey is IdentityService.GenerateServiceAccountKey (SPEC E4).
func (s *server) mintKey(ctx context.Context, in *mintKeyInput) (*mintKeyOutput, error) {
	by := principal(ctx)
	tenant := in.Body.Tenant
	if tenant == "" {
		tenant = by.Tenant
	}
	key, token, err := s.Auth.MintKeyFor(ctx, by, tenant, in.Body.Name)
	if err != nil {
		return nil, problemOf(err)
	}
	return &mintKeyOutput{MintedKey{Key: key, Token: token}}, nil
}

type keyID struct {
	ID string `path:"id" doc:"sa-<name>" maxLength:"128"`
}

type keyOutput struct{ Body auth.Key }

func (s *server) revokeKey(ctx context.Context, in *keyID) (*keyOutput, error) {
	key, err := s.Auth.RevokeKey(ctx, principal(ctx), in.ID)
	if err != nil {
		return nil, problemOf(err)
	}
	return &keyOutput{key}, nil
}

func (s *server) listTenants(ctx context.Context, _ *struct{}) (*list[auth.Tenant], error) {
	return listOf(s.Auth.Tenants(ctx, principal(ctx)))
}

type createTenantInput struct {
	Body struct {
		Name string `json:"name" doc:"DNS label" example:"acme"`
	}
}

// CreatedTenant is a new tenant with its first admin's token.
type CreatedTenant struct {
	Name  string `json:"name"`
	Token string `json:"token" doc:"Session token of the tenant's first ORG_ADMIN. It is shown this once and not stored"`
}

type createTenantOutput struct{ Body CreatedTenant }

func (s *server) createTenant(ctx context.Context, in *createTenantInput) (*createTenantOutput, error) {
	token, err := s.Auth.CreateTenant(ctx, principal(ctx), in.Body.Name)
	if err != nil {
		return nil, problemOf(err)
	}
	return &createTenantOutput{CreatedTenant{Name: in.Body.Name, Token: token}}, nil
}

type recoverTenantInput struct {
	Name  string `path:"name" doc:"The tenant" maxLength:"63"`
	Admin string `query:"admin" default:"owner" doc:"Which of its ORG_ADMINs: the first one that it had is owner" maxLength:"63"`
	Body  *struct {
		Force bool `json:"force,omitempty" doc:"Also while one of the tenant's ORG_ADMINs has a session"`
	}
}

// recoverTenant is the operator's way back into a tenant whose admins have no session left.
func (s *server) recoverTenant(ctx context.Context, in *recoverTenantInput) (*newTokenOutput, error) {
	token, err := s.Auth.RecoverTenant(ctx, principal(ctx), in.Name, in.Admin, in.Body != nil && in.Body.Force)
	if err != nil {
		return nil, problemOf(err)
	}
	return &newTokenOutput{NewToken{Name: in.Admin, Token: token}}, nil
}

func (s *server) listPeople(ctx context.Context, _ *struct{}) (*list[auth.Person], error) {
	return listOf(s.Auth.People(ctx, principal(ctx)))
}

type createPersonInput struct {
	Body struct {
		Name string    `json:"name" doc:"DNS label" example:"ada"`
		Role auth.Role `json:"role" enum:"READER,WRITER,ORG_ADMIN"`
	}
}

// CreatedPerson is a new person with a session token.
type CreatedPerson struct {
	Name  string    `json:"name"`
	Role  auth.Role `json:"role"`
	Token string    `json:"token" doc:"Session token. It is shown this once and not stored"`
}

type createPersonOutput struct{ Body CreatedPerson }

func (s *server) createPerson(ctx context.Context, in *createPersonInput) (*createPersonOutput, error) {
	token, err := s.Auth.CreatePerson(ctx, principal(ctx), in.Body.Name, in.Body.Role)
	if err != nil {
		return nil, problemOf(err)
	}
	return &createPersonOutput{CreatedPerson{in.Body.Name, in.Body.Role, token}}, nil
}

type personName struct {
	Name string `path:"name" maxLength:"63"`
}

// NewToken is a person's new session.
type NewToken struct {
	Name  string `json:"name"`
	Token string `json:"token" doc:"Session token. It is shown this once and not stored; all earlier ones have ended"`
}

type newTokenOutput struct{ Body NewToken }

func (s *server) renewSession(ctx context.Context, in *personName) (*newTokenOutput, error) {
	token, err := s.Auth.NewSession(ctx, principal(ctx), in.Name)
	if err != nil {
		return nil, problemOf(err)
	}
	return &newTokenOutput{NewToken{Name: in.Name, Token: token}}, nil
}

func (s *server) removePerson(ctx context.Context, in *personName) (*struct{}, error) {
	if err := s.Auth.RemovePerson(ctx, principal(ctx), in.Name); err != nil {
		return nil, problemOf(err)
	}
	return nil, nil
}

// Session tells whose session a token is.
type Session struct {
	Tenant    string    `json:"tenantId,omitempty"`
	Name      string    `json:"name"`
	Role      auth.Role `json:"role"`
	ExpiresAt time.Time `json:"expiresAt"`
}

type sessionOutput struct{ Body Session }

func (s *server) getSession(ctx context.Context, _ *struct{}) (*sessionOutput, error) {
	p := principal(ctx)
	return &sessionOutput{Session{Tenant: p.Tenant, Name: p.Name, Role: p.Role, ExpiresAt: p.ExpiresAt}}, nil
}

type auditInput struct {
	Limit int `query:"limit" default:"100" minimum:"1" maximum:"1000" doc:"Events at most, the newest"`
}

func (s *server) listAudit(ctx context.Context, in *auditInput) (*list[json.RawMessage], error) {
	p := principal(ctx)
	var err error
	switch {
	case p.Tenant == "":
		err = errNoTenant()
	case p.Role != auth.RoleOrgAdmin:
		err = schemas.Errorf(schemas.CodeForbidden, "only an ORG_ADMIN may read the audit")
	}
	if err != nil {
		return nil, s.refused(p, "audit.list", "tenant", p.Tenant, err)
	}
	events, err := s.Audit.List(ctx, p.Tenant, in.Limit)
	if err != nil {
		return nil, problemOf(err)
	}
	out := make([]json.RawMessage, len(events))
	for i, e := range events {
		if out[i], err = protojson.Marshal(e); err != nil {
			return nil, problemOf(err)
		}
	}
	return listOf(out, nil)
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the caller has gone
}
