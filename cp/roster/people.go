package roster

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/internal/cloudmeta"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Errors of what people do: CodeUnauthorized and CodeForbidden for who may not (SPEC R6), CodeInvalid for a wrong name,
// address, zone or label, CodeLimit for a limit, CodeNotFound for a runner or token that the tenant doesn't have,
// CodeConflict for a taken name or a state that doesn't allow it, CodeRunnerRevoked for a revoked runner, and CodeUnavailable
// when it can't be decided or recorded now.

// Allowed returns nil if by may change the dialled runners of their tenant, else an error that says why not (SPEC R6).
func (r *Roster) Allowed(by auth.Principal) error {
	switch {
	case by.Role == auth.RoleOperator:
		return schemas.Errorf(schemas.CodeForbidden, "the platform's operator belongs to no tenant and has no runners").
			WithHint("use the token of a person of the tenant")
	case by.Role == "" || by.Tenant == "" || by.Name == "":
		return schemas.Errorf(schemas.CodeUnauthorized, "who is not signed in to a tenant may not change runners")
	case by.Role == auth.RoleReader:
		return schemas.Errorf(schemas.CodeForbidden, "a READER may only list: to change runners takes a WRITER or an ORG_ADMIN")
	case len(r.d.Admins) == 0, slices.Contains(r.d.Admins, by.Name), slices.Contains(r.d.Admins, by.Tenant+"/"+by.Name):
		return nil
	}
	return schemas.Errorf(schemas.CodeForbidden, "%q is not one of those who may change runners", by.Name).
		WithHint("CORE_RUNNER_ADMINS of the control plane lists them")
}

// Create registers a runner, PENDING, and mints its first token (SPEC R4).
func (r *Roster) Create(ctx context.Context, by auth.Principal, s Spec) (Runner, Minted, error) {
	var runner Runner
	var minted Minted
	err := r.act(ctx, by, "runner.create", s.Name, func(e event, tell telling) error {
		if err := validName(s.Name); err != nil {
			return err
		}
		e["name"] = s.Name
		address, err := r.validAddress(s.Address)
		if err != nil {
			return err
		}
		if err := validZone(s.Zone); err != nil {
			return err
		}
		if err := validLabels(s.Labels); err != nil {
			return err
		}
		id := schemas.NewRunnerID()
		e["runner"], e["address"], e["zone"], e["labels"] = id, address.String(), s.Zone, labelText(s.Labels)
		runner = Runner{
			ID: id, Tenant: by.Tenant, Name: s.Name, Address: address.String(), Zone: s.Zone, Labels: maps.Clone(s.Labels),
			State: Pending, CreatedBy: by.Actor(),
		}
		minted, err = r.mint(ctx, id, func(token Token) error {
			return r.change(ctx, by.Tenant, tell, func(d *document, now time.Time) error {
				if d.runner(s.Name) != nil {
					return errNameTaken(s.Name)
				}
				if _, taken := r.lookUp(id); taken {
					return schemas.Errorf(schemas.CodeConflict, "the runner id is taken").WithHint("try again")
				}
				runner.CreatedAt = now
				d.Runners = append(d.Runners, runner)
				d.Tokens = append(d.Tokens, token)
				if err := d.limits(now); err != nil {
					return err
				}
				e["token"] = token.ID
				return nil
			})
		})
		return err
	})
	if err != nil {
		return Runner{}, Minted{}, err
	}
	return runner.clone(), minted, nil
}

// Edit changes name, address, zone or labels of a runner, named by id or name. Its certificate stays valid. A zone or label
// change on a PENDING runner revokes its live token (SPEC R5).
func (r *Roster) Edit(ctx context.Context, by auth.Principal, id string, c Change) (Runner, error) {
	var runner Runner
	err := r.act(ctx, by, "runner.edit", id, func(e event, tell telling) error {
		if err := r.valid(&c); err != nil {
			return err
		}
		return r.change(ctx, by.Tenant, tell, func(d *document, now time.Time) error {
			clear(e)
			found, err := d.changeable(id)
			if err != nil {
				return err
			}
			e["runner"] = found.ID
			if c.Name != nil && *c.Name != found.Name && d.runner(*c.Name) != nil {
				return errNameTaken(*c.Name)
			}
			rescoped, changed := c.apply(found, e)
			if !changed {
				runner = found.clone()
				return errUnchanged
			}
			if rescoped && found.State == Pending {
				if revoked := d.revokeTokens(found.ID, now); len(revoked) > 0 {
					e["revokedTokens"] = strings.Join(revoked, ",")
				}
			}
			runner = found.clone()
			return d.limits(now)
		})
	})
	return runner, err
}

// validAddress reads an address (SPEC C2). One that is not dialled is refused here so that it is told at once; what a name leads to is
// seen when it is dialled.
func (r *Roster) validAddress(text string) (schemas.Address, error) {
	address, err := schemas.ParseAddress(text)
	if err != nil {
		return address, err
	}
	rule := cloudmeta.Name(address.Host)
	if ip, err := netip.ParseAddr(address.Host); err == nil {
		rule = r.d.Dial.Refuses(netip.AddrPortFrom(ip, address.Port))
	}
	if rule != "" {
		return address, schemas.Errorf(schemas.CodeInvalid, "the control plane dials no runner at %s: %s", address.Host, rule)
	}
	return address, nil
}

// valid checks what is to be changed and brings the address into its canonical form.
func (r *Roster) valid(c *Change) error {
	if c.Name != nil {
		if err := validName(*c.Name); err != nil {
			return err
		}
	}
	if c.Address != nil {
		address, err := r.validAddress(*c.Address)
		if err != nil {
			return err
		}
		canonical := address.String()
		c.Address = &canonical
	}
	if c.Zone != nil {
		if err := validZone(*c.Zone); err != nil {
			return err
		}
	}
	if c.Labels != nil {
		return validLabels(*c.Labels)
	}
	return nil
}

// apply makes the change and notes old and new. rescoped: zone or labels are different.
func (c Change) apply(r *Runner, e event) (rescoped, changed bool) {
	set := func(what string, field, to *string) bool {
		if to == nil || *to == *field {
			return false
		}
		e[what], e["old"+strings.ToUpper(what[:1])+what[1:]] = *to, *field
		*field, changed = *to, true
		return true
	}
	set("name", &r.Name, c.Name)
	set("address", &r.Address, c.Address)
	rescoped = set("zone", &r.Zone, c.Zone)
	if c.Labels != nil && !maps.Equal(*c.Labels, r.Labels) {
		e["labels"], e["oldLabels"] = labelText(*c.Labels), labelText(r.Labels)
		r.Labels = maps.Clone(*c.Labels)
		rescoped, changed = true, true
	}
	return rescoped, changed
}

// Mint gives a PENDING runner, named by id or name, a new token; the one before is revoked by it (SPEC R5).
func (r *Roster) Mint(ctx context.Context, by auth.Principal, id string) (Runner, Minted, error) {
	var runner Runner
	var minted Minted
	err := r.act(ctx, by, "runner.token", id, func(e event, tell telling) error {
		if id == schemas.ConsoleRunner {
			return errConsole()
		}
		found, ok, err := r.Find(by.Tenant, id)
		if err != nil {
			return unavailable(err)
		}
		if !ok {
			return errNoRunner(id)
		}
		minted, err = r.mint(ctx, found.ID, func(token Token) error {
			return r.change(ctx, by.Tenant, tell, func(d *document, now time.Time) error {
				clear(e)
				found, err := d.changeable(found.ID)
				if err != nil {
					return err
				}
				e["runner"], e["token"] = found.ID, token.ID
				if found.State != Pending {
					return schemas.Errorf(schemas.CodeConflict, "runner %q is enrolled: only a PENDING one gets a token", found.Name).
						WithHint("a host that was lost: revoke this runner and create another one")
				}
				if revoked := d.revokeTokens(found.ID, now); len(revoked) > 0 {
					e["revokedTokens"] = strings.Join(revoked, ",")
				}
				d.Tokens = append(d.Tokens, token)
				runner = found.clone()
				return d.limits(now)
			})
		})
		return err
	})
	if err != nil {
		return Runner{}, Minted{}, err
	}
	return runner, minted, nil
}

// RevokeToken ends a token that was not used. One that has ended already is no error, a used one is.
func (r *Roster) RevokeToken(ctx context.Context, by auth.Principal, tokenID string) error {
	return r.actOn(ctx, by, "runner.token.revoke", audit.Subject("token", tokenID), func(e event, tell telling) error {
		return r.change(ctx, by.Tenant, tell, func(d *document, now time.Time) error {
			clear(e)
			token := d.token(tokenID)
			if token == nil {
				return schemas.Errorf(schemas.CodeNotFound, "the tenant has no enrolment token of that id").WithHint("`runink runner show` lists the tokens of a runner")
			}
			e["token"], e["runner"] = token.ID, token.RunnerID
			if token.UsedAt != nil {
				return schemas.Errorf(schemas.CodeConflict, "the token was used: its runner is enrolled").WithHint("revoke the runner (`runink runner revoke`)")
			}
			if !token.Live(now) {
				return errUnchanged
			}
			token.RevokedAt = &now
			return nil
		})
	})
}

// Revoke ends a runner, named by id or name, and its tokens, for good. One that is revoked already is no error.
func (r *Roster) Revoke(ctx context.Context, by auth.Principal, id string) (Runner, error) {
	var runner Runner
	err := r.act(ctx, by, "runner.revoke", id, func(e event, tell telling) error {
		return r.change(ctx, by.Tenant, tell, func(d *document, now time.Time) error {
			clear(e)
			found, err := d.find(id)
			if err != nil {
				return err
			}
			e["runner"] = found.ID
			if found.State == Revoked {
				runner = found.clone()
				return errUnchanged
			}
			d.revokeTokens(found.ID, now)
			found.State, found.RevokedAt, found.Next = Revoked, &now, nil
			runner = found.clone()
			return nil
		})
	})
	return runner, err
}

// Remove forgets a REVOKED runner, named by id or name: its name and its place are free again.
func (r *Roster) Remove(ctx context.Context, by auth.Principal, id string) error {
	return r.act(ctx, by, "runner.remove", id, func(e event, tell telling) error {
		return r.change(ctx, by.Tenant, tell, func(d *document, _ time.Time) error {
			clear(e)
			found, err := d.find(id)
			if err != nil {
				return err
			}
			e["runner"], e["name"] = found.ID, found.Name
			if found.State != Revoked {
				return schemas.Errorf(schemas.CodeConflict, "runner %q is %s: only a REVOKED one is removed", found.Name, found.State).
					WithHint("revoke it first (`runink runner revoke`)")
			}
			gone := found.ID
			d.Tokens = slices.DeleteFunc(d.Tokens, func(t Token) bool { return t.RunnerID == gone })
			d.Runners = slices.DeleteFunc(d.Runners, func(r Runner) bool { return r.ID == gone })
			return nil
		})
	})
}

// event are the details of an audit event while what it tells of is decided.
type event map[string]string

// telling is asked for the event of a change when it was decided (Roster.change).
type telling func() *runbusv1.AuditEvent

// act runs do, on the runner that its caller calls id, if by may, and records what came of it: durably if it was done, else as a note.
func (r *Roster) act(ctx context.Context, by auth.Principal, action, id string, do func(event, telling) error) error {
	return r.actOn(ctx, by, action, audit.Subject("runner", id), do)
}

// actOn is act on something else than a runner, until do has found out whose it is.
func (r *Roster) actOn(ctx context.Context, by auth.Principal, action, subject string, do func(event, telling) error) error {
	details := event{}
	eventOf := func(outcome string) *runbusv1.AuditEvent {
		about := subject
		if runner := details["runner"]; runner != "" {
			about = audit.Subject("runner", runner)
		}
		e := audit.Event(by.Actor(), action, about, outcome)
		e.Tenant, e.Details = by.Tenant, maps.Clone(details)
		return e
	}
	var done *runbusv1.AuditEvent
	err := r.Allowed(by)
	if err == nil {
		err = do(details, func() *runbusv1.AuditEvent {
			done = eventOf("ok")
			return done
		})
	}
	if err != nil {
		r.writers(by.Tenant).end(done.GetId()) // if the change stands all the same, its event stays owed
		var known *schemas.Error
		if errors.As(err, &known) {
			details["reason"] = known.Message
		}
		r.d.Audit.Note(eventOf(string(schemas.CodeOf(err))))
		return err
	}
	if done == nil { // all was as it should be
		done = eventOf("ok")
	}
	return r.conclude(ctx, done, nil)
}

// mint makes a token, keeps its proof key, and has store write it. The proof key is first: a token that is stored can be
// proven. One that is not stored is forgotten.
func (r *Roster) mint(ctx context.Context, runnerID string, store func(Token) error) (Minted, error) {
	now := r.d.Now().UTC()
	m := Minted{TokenID: schemas.NewID(), ExpiresAt: now.Add(TicketLife)}
	_, _ = rand.Read(m.Token[:]) // never fails, crypto/rand
	key := schemas.EnrolmentKey(m.Token, runnerID)
	revision, err := r.proofs.Create(ctx, m.TokenID, proof{Key: key[:]})
	if err != nil {
		return Minted{}, unavailable(err)
	}
	token := Token{ID: m.TokenID, RunnerID: runnerID, SHA256: hashOf(m.Token), CreatedAt: now, ExpiresAt: m.ExpiresAt}
	if err := store(token); err != nil {
		if err := r.proofs.Delete(context.WithoutCancel(ctx), m.TokenID, revision); err != nil {
			r.d.Log.Warn("the proof key of a token that was not stored expires by itself", "runner", runnerID, "error", err)
		}
		return Minted{}, err
	}
	return m, nil
}

// find is the runner that id or name means, or why there is none.
func (d *document) find(id string) (*Runner, error) {
	if id == schemas.ConsoleRunner {
		return nil, errConsole()
	}
	if r := d.runner(id); r != nil {
		return r, nil
	}
	return nil, errNoRunner(id)
}

// changeable is find for what needs a runner that is not revoked.
func (d *document) changeable(id string) (*Runner, error) {
	r, err := d.find(id)
	if err == nil && r.State == Revoked {
		return nil, schemas.ErrRunnerRevoked(r.Name)
	}
	return r, err
}

// validName returns nil for a DNS label that is not reserved and not an id.
func validName(name string) error {
	if looksSecret(name) {
		return schemas.Errorf(schemas.CodeInvalid, "the runner name looks like a token: those belong into no registry")
	}
	if err := schemas.ValidName("runner name", name); err != nil {
		return err
	}
	if schemas.IsDialledID(name) {
		return schemas.Errorf(schemas.CodeInvalid, "the runner name %q has the form of an id: choose another one", name)
	}
	return nil
}

func errConsole() error {
	return schemas.Errorf(schemas.CodeForbidden, "the Runink managed runner is the platform's own: it can't be changed, enrolled or revoked")
}

func errNameTaken(name string) error {
	return schemas.Errorf(schemas.CodeConflict, "the tenant has a runner named %q already", name).
		WithHint("choose another name; a revoked runner keeps its name until it is removed (`runink runner remove`)")
}

func errNoRunner(id string) error {
	if schemas.ValidRunnerID(id) != nil {
		return schemas.ErrNotARunnerName()
	}
	return schemas.Errorf(schemas.CodeNotFound, "the tenant has no dialled runner %q", id).WithHint("`runink runner list` shows the runners")
}

// labelText is labels as an audit event has them.
func labelText(labels map[string]string) string {
	if len(labels) == 0 {
		return ""
	}
	text, err := json.Marshal(labels)
	if err != nil { // strings always encode
		return ""
	}
	return string(text)
}
