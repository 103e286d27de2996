package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"
)

func saveFlag() cli.Flag {
	return &cli.StringFlag{Name: "save-context", Usage: "keep the token in a context of this `NAME` instead of printing it"}
}

// printOrKeep shows a token once, or keeps it in a context.
func printOrKeep(c *cli.Context, s endpoint, token string, v any, format string, args ...any) error {
	name := c.String("save-context")
	if name == "" {
		return say(c, v, format+"\n\n%s\n\nIt is shown this once and not stored.", append(args, token)...)
	}
	s.Token, s.DataDir = token, ""
	if err := saveContext(name, s, false); err != nil {
		return err
	}
	return say(c, map[string]string{"context": name}, format+" is in the context %q", append(args, name)...)
}

func tenantCommand() *cli.Command {
	type tenant struct {
		Name      string    `json:"name"`
		CreatedAt time.Time `json:"createdAt"`
	}
	return group("tenant", "tenants of the platform (its operator only)",
		remote("create", "create a tenant and print its first admin's token", "NAME", []cli.Flag{saveFlag()}, func(c *cli.Context) error {
			name, err := oneArg(c, "NAME")
			if err != nil {
				return err
			}
			s, api, err := connectAs(c, operatorServer)
			if err != nil {
				return err
			}
			var made struct {
				Name  string `json:"name"`
				Token string `json:"token"`
			}
			if err := api.call(c.Context, http.MethodPost, "/api/tenants", map[string]string{"name": name}, &made); err != nil {
				return err
			}
			return printOrKeep(c, s, made.Token, made, "tenant %s is made; the session token of its first admin", made.Name)
		}),
		remote("recover", "end the sessions of a tenant's admin and print a new session token: for a tenant whose admins have none left", "NAME", []cli.Flag{
			&cli.StringFlag{Name: "admin", Value: "owner", Usage: "`NAME` of the ORG_ADMIN; that of the tenant's first one is owner"},
			&cli.BoolFlag{Name: "force", Usage: "also while one of the tenant's admins has a session", DisableDefaultText: true}, saveFlag(),
		}, func(c *cli.Context) error {
			name, err := oneArg(c, "NAME")
			if err != nil {
				return err
			}
			s, api, err := connectAs(c, operatorServer)
			if err != nil {
				return err
			}
			var made struct {
				Name  string `json:"name"`
				Token string `json:"token"`
			}
			path := "/api/tenants/" + url.PathEscape(name) + "/session?" + url.Values{"admin": {c.String("admin")}}.Encode()
			if err := api.call(c.Context, http.MethodPost, path, map[string]bool{"force": c.Bool("force")}, &made); err != nil {
				return err
			}
			return printOrKeep(c, s, made.Token, made, "the earlier sessions of %s, an admin of the tenant %s, have ended; the new session token", made.Name, name)
		}),
		remote("list", "list the tenants", "", nil, func(c *cli.Context) error {
			var rows []tenant
			if err := get(c, operatorServer, "/api/tenants", &rows); err != nil {
				return err
			}
			return show(c, rows, []string{"NAME", "CREATED"}, func(t tenant) []any { return []any{t.Name, stamp(t.CreatedAt)} })
		}),
	)
}

func userCommand() *cli.Command {
	type person struct {
		Name      string    `json:"name"`
		Role      string    `json:"role"`
		CreatedAt time.Time `json:"createdAt"`
	}
	return group("user", "people of the tenant (ORG_ADMIN only)",
		remote("create", "create a person and print their session token", "NAME", []cli.Flag{
			&cli.StringFlag{Name: "role", Usage: "READER lists, WRITER also runs fetches, ORG_ADMIN does everything in the tenant"}, saveFlag(),
		}, func(c *cli.Context) error {
			name, err := oneArg(c, "NAME")
			if err != nil {
				return err
			}
			role := strings.ToUpper(c.String("role"))
			if !slices.Contains([]string{"READER", "WRITER", "ORG_ADMIN"}, role) {
				return usagef("--role %q: name one with --role READER, WRITER or ORG_ADMIN", c.String("role"))
			}
			s, api, err := connectAs(c, chosen)
			if err != nil {
				return err
			}
			var made struct {
				Name  string `json:"name"`
				Role  string `json:"role"`
				Token string `json:"token"`
			}
			body := map[string]string{"name": name, "role": role}
			if err := api.call(c.Context, http.MethodPost, "/api/people", body, &made); err != nil {
				return err
			}
			return printOrKeep(c, s, made.Token, made, "%s is %s; the session token", made.Name, made.Role)
		}),
		remote("list", "list the people", "", nil, func(c *cli.Context) error {
			var rows []person
			if err := get(c, chosen, "/api/people", &rows); err != nil {
				return err
			}
			return show(c, rows, []string{"NAME", "ROLE", "CREATED"}, func(p person) []any {
				return []any{p.Name, p.Role, stamp(p.CreatedAt)}
			})
		}),
		remote("renew", "end a person's sessions and print a new session token", "NAME", []cli.Flag{saveFlag()}, func(c *cli.Context) error {
			name, err := oneArg(c, "NAME")
			if err != nil {
				return err
			}
			s, api, err := connectAs(c, chosen)
			if err != nil {
				return err
			}
			var made struct {
				Name  string `json:"name"`
				Token string `json:"token"`
			}
			if err := api.call(c.Context, http.MethodPost, "/api/people/"+url.PathEscape(name)+"/session", nil, &made); err != nil {
				return err
			}
			return printOrKeep(c, s, made.Token, made, "the earlier sessions of %s have ended; the new session token", made.Name)
		}),
		remote("remove", "remove a person; their sessions end", "NAME", nil, func(c *cli.Context) error {
			name, err := oneArg(c, "NAME")
			if err != nil {
				return err
			}
			if err := do(c, http.MethodDelete, "/api/people/"+url.PathEscape(name), nil, nil); err != nil {
				return err
			}
			return say(c, map[string]string{"removed": name}, "%s is removed", name)
		}),
	)
}

// serviceKey is a service-account key as the API shows it.
type serviceKey struct {
	ID        string     `json:"id"`
	Name      string     `json:"name"`
	Tenant    string     `json:"tenant"`
	PublicKey string     `json:"publicKey"`
	CreatedAt time.Time  `json:"createdAt"`
	ExpiresAt time.Time  `json:"expiresAt"`
	CreatedBy string     `json:"createdBy"`
	RevokedAt *time.Time `json:"revokedAt"`
}

func (k serviceKey) state(now time.Time) string {
	switch {
	case k.RevokedAt != nil:
		return "revoked"
	case !now.Before(k.ExpiresAt):
		return "expired"
	}
	return "live"
}

func keyCommand() *cli.Command {
	type minted struct {
		serviceKey
		Token string `json:"token"`
	}
	return group("key", "service-account keys, with which runners enrol (ORG_ADMIN only)",
		remote("create", "mint a key and print its token", "NAME", nil, func(c *cli.Context) error {
			name, err := oneArg(c, "NAME")
			if err != nil {
				return err
			}
			var made minted
			if err := do(c, http.MethodPost, "/api/service-account-keys", map[string]string{"name": name}, &made); err != nil {
				return err
			}
			return say(c, made, "key %s is valid until %s. Its token, for RUNNER_ENROLL_TOKEN:\n\n%s\n\nIt is shown this once and not stored.",
				made.ID, stamp(made.ExpiresAt), made.Token)
		}),
		remote("list", "list the keys", "", nil, func(c *cli.Context) error {
			var rows []serviceKey
			if err := get(c, chosen, "/api/service-account-keys", &rows); err != nil {
				return err
			}
			return show(c, rows, []string{"ID", "STATE", "CREATED", "BY", "EXPIRES", "PUBLIC KEY"}, func(k serviceKey) []any {
				return []any{k.ID, k.state(time.Now()), stamp(k.CreatedAt), k.CreatedBy, stamp(k.ExpiresAt), k.PublicKey}
			})
		}),
		remote("revoke", "revoke a key; a live runner of it is cut", "ID", nil, func(c *cli.Context) error {
			id, err := oneArg(c, "ID")
			if err != nil {
				return err
			}
			var gone serviceKey
			if err := do(c, http.MethodDelete, "/api/service-account-keys/"+url.PathEscape(id), nil, &gone); err != nil {
				return err
			}
			return say(c, gone, "key %s is revoked", gone.ID)
		}),
	)
}

func auditCommand() *cli.Command {
	type event struct {
		At      time.Time         `json:"at"`
		Actor   string            `json:"actor"`
		Action  string            `json:"action"`
		Subject string            `json:"subject"`
		Outcome string            `json:"outcome"`
		Details map[string]string `json:"details"`
	}
	return group("audit", "the tenant's audit (ORG_ADMIN only)",
		remote("list", "list the newest events, newest last", "", []cli.Flag{
			&cli.IntFlag{Name: "limit", Value: 100, Usage: "events at most (1-1000)"},
		}, func(c *cli.Context) error {
			if n := c.Int("limit"); n < 1 || n > 1000 {
				return usagef("--limit %d: use 1 to 1000", n)
			}
			path := fmt.Sprintf("/api/audit?limit=%d", c.Int("limit"))
			if c.Bool("json") {
				var raw []json.RawMessage
				if err := get(c, chosen, path, &raw); err != nil {
					return err
				}
				return printJSON(c.App.Writer, raw)
			}
			var rows []event
			if err := get(c, chosen, path, &rows); err != nil {
				return err
			}
			return show(c, rows, []string{"AT", "WHO", "WHAT", "OF", "OUTCOME", "REASON"}, func(e event) []any {
				return []any{stamp(e.At), e.Actor, e.Action, e.Subject, e.Outcome, e.Details["reason"]}
			})
		}),
	)
}

// connectAs is a client for the server that which chooses.
func connectAs(c *cli.Context, which func(*cli.Context) (endpoint, error)) (endpoint, *client, error) {
	s, err := which(c)
	if err != nil {
		return s, nil, err
	}
	api, err := newClient(s)
	return s, api, err
}

func get(c *cli.Context, which func(*cli.Context) (endpoint, error), path string, out any) error {
	if err := noArgs(c); err != nil {
		return err
	}
	_, api, err := connectAs(c, which)
	if err != nil {
		return err
	}
	return api.call(c.Context, http.MethodGet, path, nil, out)
}

func do(c *cli.Context, method, path string, body, out any) error {
	_, api, err := connectAs(c, chosen)
	if err != nil {
		return err
	}
	return api.call(c.Context, method, path, body, out)
}
