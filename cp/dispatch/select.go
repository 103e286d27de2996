package dispatch

import (
	"cmp"
	"strings"

	"github.com/org-runink/runbus/cp/registry"
	"github.com/org-runink/runbus/schemas"
)

// Select finds the runner that name means among the runners of the caller's tenant, and returns it if it may be given work.
// name is an id or a name; an id wins. Of several runners that claim the same name, the one that is connected is meant; if
// that doesn't leave one, the name is refused. There is no fallback: a refusal says why this runner gets no work (SPEC D3,
// D7, D8).
func Select(runners []registry.Candidate, name string) (*registry.Candidate, error) {
	if name == "" {
		return nil, schemas.ErrNoRunner()
	}
	if schemas.ValidRunnerID(name) != nil { // ids include DNS labels and `console`
		return nil, schemas.ErrNotARunnerName()
	}
	c, err := find(runners, name)
	if err != nil {
		return nil, err
	}
	id, offline := c.Label(), schemas.ErrRunnerOffline
	if c.Link == registry.LinkDialled {
		offline = schemas.ErrDialledOffline
	}
	switch {
	case c.Link == registry.LinkLocal && (c.Offline != "" || !c.Connected || c.Session == ""):
		return c, schemas.ErrManagedUnreachable(cmp.Or(c.Offline, "not connected"))
	case c.Revoked:
		return c, schemas.ErrRunnerRevoked(id)
	case c.Pending:
		return c, schemas.ErrNotEnrolled(id)
	case c.Offline != "":
		return c, offline(id, c.Offline)
	case !c.Connected || c.Session == "":
		return c, offline(id, "not connected")
	case c.Draining:
		return c, schemas.ErrRunnerOffline(id, "draining")
	}
	return c, nil
}

// find resolves a name.
func find(runners []registry.Candidate, name string) (*registry.Candidate, error) {
	var named, connected []*registry.Candidate
	for i := range runners {
		c := &runners[i]
		if c.Ref.Runner == name {
			return c, nil
		}
		if c.Name == name {
			named = append(named, c)
			if c.Connected {
				connected = append(connected, c)
			}
		}
	}
	if len(connected) == 1 {
		return connected[0], nil
	}
	switch len(named) {
	case 0:
		return nil, schemas.ErrRunnerUnknown(name)
	case 1:
		return named[0], nil
	}
	var ids []string
	for _, c := range named {
		if len(ids) == 5 {
			ids = append(ids, "…")
			break
		}
		ids = append(ids, c.Ref.Runner)
	}
	return nil, schemas.Errorf(schemas.CodeInvalid, "%d runners are named %q", len(named), name).
		WithHint("use the id of one: " + strings.Join(ids, ", "))
}
