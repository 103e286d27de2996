package auth

import "github.com/org-runink/runbus/schemas"

// tenantAdmin returns nil if by is an admin of an existing tenant, else an error that says why not. what is what they
// wanted to do, for example `mint service-account keys`.
func (a *Auth) tenantAdmin(by Principal, what string) *schemas.Error {
	switch by.Role {
	case RoleOrgAdmin:
	case RoleReader:
		return schemas.Errorf(schemas.CodeForbidden, "a READER may only list: to %s takes an ORG_ADMIN of the tenant", what)
	case RoleWriter:
		return schemas.Errorf(schemas.CodeForbidden, "a WRITER may list and run fetches: to %s takes an ORG_ADMIN of the tenant", what)
	case RoleOperator:
		return schemas.Errorf(schemas.CodeForbidden, "the platform's operator belongs to no tenant: to %s takes an ORG_ADMIN of the tenant", what).
			WithHint("use the token of an admin of the tenant")
	default:
		return schemas.Errorf(schemas.CodeUnauthorized, "who is not signed in with a known role may not %s", what)
	}
	if by.Tenant == "" || by.Name == "" {
		return schemas.Errorf(schemas.CodeUnauthorized, "who is not signed in to a tenant may not %s", what)
	}
	if _, ok := a.dir.tenant(by.Tenant); !ok {
		return schemas.Errorf(schemas.CodeForbidden, "the tenant %q does not exist", by.Tenant)
	}
	return nil
}

// operator returns nil if by is the platform's operator.
func operator(by Principal, what string) *schemas.Error {
	if by.Role == RoleOperator && by.Tenant == "" {
		return nil
	}
	if by.Role == "" {
		return schemas.Errorf(schemas.CodeUnauthorized, "who is not signed in may not %s", what)
	}
	return schemas.Errorf(schemas.CodeForbidden, "only the platform's operator may %s", what).
		WithHint("its token is in the control plane's data folder")
}
