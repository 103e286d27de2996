package api

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/registry"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Dialling is what the API asks of the part that dials runners. None of it blocks but Order.
type Dialling struct {
	// CASHA256 is the SHA-256 of the runner CA's certificate, for tickets.
	CASHA256 func() [32]byte
	// Connect has a runner dialled at once (SPEC C7).
	Connect func(id string)
	// Link is what this replica knows of its link to a runner; the zero value if another one dials it.
	Link func(id string) LinkState
	// Order sends an order to the session that a runner has and waits for the reply.
	Order func(ctx context.Context, ref schemas.RunnerRef, order *runbusv1.RunnerControl) (*runbusv1.RunnerControlReply, error)
}

// LinkState is what this replica knows of its link to a runner.
type LinkState struct {
	Connected bool       `json:"connected"`
	Since     *time.Time `json:"since,omitempty"`
	PeerAddr  string     `json:"peerAddr,omitempty"`
	LastError string     `json:"lastError,omitempty" doc:"Of the last attempt, until one succeeds"`
	NextTry   *time.Time `json:"nextTry,omitempty" doc:"While the next attempt is waited for"`
	// Health is the runner's last claim about its process, and HealthAt when it made it (SPEC C10).
	Health   *runbusv1.RunnerHealth `json:"-"`
	HealthAt *time.Time             `json:"-"`
}

// runnerOperations are the ones on dialled runners (SPEC R3–R5).
func (s *server) runnerOperations(api huma.API) {
	limited := func(op *huma.Operation) { op.Errors = append(op.Errors, http.StatusTooManyRequests) }
	register(api, http.MethodGet, "/api/runners", "listRunners", "Runners of the tenant, the managed one first; nothing is dialled", "runners", s.listRunners)
	register(api, http.MethodPost, "/api/runners", "createRunner", "Create a runner that is dialled; its ticket is shown once", "runners", s.createRunner, created, limited)
	register(api, http.MethodGet, "/api/runners/{id}", "getRunner", "One runner, with its certificate, tokens and link", "runners", s.getRunner)
	register(api, http.MethodPatch, "/api/runners/{id}", "editRunner", "Change name, address, zone or labels of a dialled runner; its certificate stays valid", "runners", s.editRunner, limited)
	register(api, http.MethodDelete, "/api/runners/{id}", "removeRunner", "Forget a REVOKED runner: the name and place of a dialled one are free again, the id of an outbound one is off the list", "runners", s.removeRunner)
	register(api, http.MethodPost, "/api/runners/{id}/token", "issueRunnerToken", "Issue a new ticket for a PENDING runner; the one before is revoked", "runners", s.issueToken, created, limited)
	register(api, http.MethodPost, "/api/runners/{id}/revoke", "revokeRunner", "Revoke a dialled runner for good; it is told, and never dialled again", "runners", s.revokeRunner)
	register(api, http.MethodPost, "/api/runners/{id}/connect", "connectRunner", "Dial a runner now rather than when it is next due", "runners", s.connectRunner, accepted)
	register(api, http.MethodGet, "/api/runners/{id}/health", "getRunnerHealth", "Ask a connected runner about its own process; no source is touched", "runners", s.getRunnerHealth)
	register(api, http.MethodDelete, "/api/runner-tokens/{id}", "revokeRunnerToken", "Revoke an unused enrolment token", "runners", s.revokeToken)
	register(api, http.MethodPost, "/api/runners/{id}/release", "releaseRunner", "Free the id of an outbound runner for another service-account key", "runners", s.releaseRunner)
}

func accepted(op *huma.Operation) { op.DefaultStatus = http.StatusAccepted }

func (s *server) listRunners(ctx context.Context, _ *struct{}) (*list[registry.Runner], error) {
	p := principal(ctx)
	if err := inTenant(p); err != nil {
		return nil, err
	}
	return listOf(s.Registry.List(p.Tenant))
}

type createRunnerInput struct {
	Body struct {
		Name    string            `json:"name" doc:"DNS label, unique in the tenant" example:"warehouse"`
		Address string            `json:"address" doc:"host:port at which the runner listens; the host is an IPv4 address, an [IPv6] address or a DNS name" example:"db.internal:7443"`
		Zone    string            `json:"zone,omitempty" doc:"Up to 63 of A-Z a-z 0-9 - _ ."`
		Labels  map[string]string `json:"labels,omitempty" doc:"At most 8"`
	}
}

// TicketIssued is a runner with the ticket that enrols it.
type TicketIssued struct {
	Runner registry.Runner `json:"runner"`
	Ticket string          `json:"ticket" doc:"Enrols this runner once. It is shown this once and not stored"`
	// Command starts the runner on its host.
	Command   string    `json:"command" doc:"What to run on the runner's host, with the ticket in it"`
	Warning   string    `json:"warning,omitempty" doc:"What is odd about the runner, such as an address that another one has"`
	TokenID   string    `json:"tokenId" doc:"For DELETE /api/runner-tokens/{id}"`
	ExpiresAt time.Time `json:"expiresAt" doc:"End of the ticket"`
}

type ticketOutput struct{ Body TicketIssued }

func (s *server) createRunner(ctx context.Context, in *createRunnerInput) (*ticketOutput, error) {
	if err := s.nameFree(principal(ctx), in.Body.Name); err != nil {
		return nil, s.refused(principal(ctx), "runner.create", "runner", in.Body.Name, err)
	}
	runner, minted, err := s.Roster.Create(ctx, principal(ctx), roster.Spec{
		Name: in.Body.Name, Address: in.Body.Address, Zone: in.Body.Zone, Labels: in.Body.Labels,
	})
	if err != nil {
		return nil, problemOf(err)
	}
	out, err := s.ticket(runner, minted) // the part that dials has heard of it
	if err == nil {
		out.Body.Warning = s.sameAddress(runner)
	}
	return out, err
}

// sameAddress warns of another runner of the tenant at r's address; "" if there is none, or that can't be told. Both may be right:
// one that takes another's place, say.
func (s *server) sameAddress(r roster.Runner) string {
	all, err := s.Roster.Runners(r.Tenant)
	if err != nil {
		return ""
	}
	for _, other := range all {
		if other.ID != r.ID && other.Address == r.Address && other.State != roster.Revoked {
			return fmt.Sprintf("runner %q has the address %s too: one process answers for one runner alone", other.Name, r.Address)
		}
	}
	return ""
}

// nameFree refuses as a name what is the id of an outbound runner: the name would take over its fetches. Whether by may create one,
// and the name itself, are the roster's to judge.
func (s *server) nameFree(by auth.Principal, name string) error {
	allowed := s.Roster.Allowed(by) == nil
	r, ok, err := s.Registry.Runner(by.Tenant, name)
	if err != nil {
		return err
	}
	if allowed && ok && r.ID == name && r.Link == registry.LinkOutbound {
		return schemas.Errorf(schemas.CodeConflict, "%q is the id of a runner that dials out", name).WithHint("choose another name")
	}
	return nil
}

type runnerID struct {
	ID string `path:"id" doc:"Id or name of the runner" maxLength:"64"`
}

func (s *server) issueToken(ctx context.Context, in *runnerID) (*ticketOutput, error) {
	runner, minted, err := s.Roster.Mint(ctx, principal(ctx), in.ID)
	if err != nil {
		return nil, s.runnerProblem(ctx, in.ID, err)
	}
	s.Runners.Connect(runner.ID) // it may be listening already
	return s.ticket(runner, minted)
}

// ticket is the one answer that shows a ticket.
func (s *server) ticket(r roster.Runner, m roster.Minted) (*ticketOutput, error) {
	address, err := schemas.ParseAddress(r.Address)
	if err != nil {
		return nil, problemOf(err)
	}
	ticket := schemas.Ticket{Token: m.Token, RunnerID: r.ID, Name: r.Name, ExpiresAt: m.ExpiresAt, CASHA256: s.Runners.CASHA256()}.Encode()
	shown, err := s.shown(r.Tenant, r.ID)
	if err != nil {
		return nil, problemOf(err)
	}
	return &ticketOutput{TicketIssued{
		Runner: shown, Ticket: ticket, TokenID: m.TokenID, ExpiresAt: m.ExpiresAt,
		Command: fmt.Sprintf("CORE_RUNNER_TICKET=%s core-runner serve --listen %s", shellQuoted(ticket), listenAt(address)),
	}}, nil
}

// shellQuoted is s as one word of a POSIX shell.
func shellQuoted(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// shown is one runner as the list shows it.
func (s *server) shown(tenant, idOrName string) (registry.Runner, error) {
	runner, ok, err := s.Registry.Runner(tenant, idOrName)
	if err != nil {
		return registry.Runner{}, err
	}
	if !ok {
		return registry.Runner{}, noRunner(idOrName)
	}
	return runner, nil
}

func noRunner(idOrName string) error {
	if err := schemas.ValidRunnerID(idOrName); err != nil {
		return schemas.ErrNotARunnerName()
	}
	return schemas.Errorf(schemas.CodeNotFound, "the tenant has no runner %q", idOrName).WithHint("`runink runner list` shows the runners")
}

// runnerProblem is the face of err, of a change of a dialled runner: that a runner is there and is not a dialled one is said so.
func (s *server) runnerProblem(ctx context.Context, idOrName string, err error) *Problem {
	if schemas.CodeOf(err) == schemas.CodeNotFound {
		if r, ok, lookErr := s.Registry.Runner(principal(ctx).Tenant, idOrName); lookErr == nil && ok && r.Link == registry.LinkOutbound {
			err = schemas.Errorf(schemas.CodeConflict, "runner %q dials out by itself: only a dialled one is changed here", idOrName).
				WithHint("what it may do hangs on its service-account key: `runink key revoke` ends it, and `runink runner remove` then takes it off the list")
		}
	}
	return problemOf(err)
}

// RunnerDetail is one runner with what is kept of it.
type RunnerDetail struct {
	registry.Runner
	CreatedAt   *time.Time    `json:"createdAt,omitempty"`
	CreatedBy   string        `json:"createdBy,omitempty"`
	EnrolledAt  *time.Time    `json:"enrolledAt,omitempty"`
	RevokedAt   *time.Time    `json:"revokedAt,omitempty"`
	Certificate *RunnerLeaf   `json:"certificate,omitempty" doc:"The one that is let in"`
	Next        *RunnerLeaf   `json:"nextCertificate,omitempty" doc:"Replaces it at its first link"`
	Tokens      []RunnerToken `json:"tokens" doc:"Its enrolment tokens, the newest last; ended ones are kept for a day"`
	Dial        *LinkState    `json:"dial,omitempty" doc:"What this replica knows of its link to a dialled runner"`
}

// RunnerLeaf is one certificate.
type RunnerLeaf struct {
	Fingerprint string    `json:"fingerprint" doc:"Hex SHA-256 of the DER"`
	NotBefore   time.Time `json:"notBefore"`
	NotAfter    time.Time `json:"notAfter"`
}

// RunnerToken is an enrolment token without the token.
type RunnerToken struct {
	ID        string    `json:"id"`
	State     string    `json:"state" enum:"live,used,revoked,expired,lost" doc:"lost: the control plane restarted before it was used, so that it can't be proven any more"`
	CreatedAt time.Time `json:"createdAt"`
	ExpiresAt time.Time `json:"expiresAt"`
}

type runnerDetailOutput struct{ Body RunnerDetail }

func (s *server) getRunner(ctx context.Context, in *runnerID) (*runnerDetailOutput, error) {
	p := principal(ctx)
	if err := inTenant(p); err != nil {
		return nil, err
	}
	shown, err := s.shown(p.Tenant, in.ID)
	if err != nil {
		return nil, problemOf(err)
	}
	detail := RunnerDetail{Runner: shown, Tokens: []RunnerToken{}}
	if shown.Link != registry.LinkDialled {
		return &runnerDetailOutput{detail}, nil
	}
	kept, ok, err := s.Roster.ByID(shown.ID)
	if err != nil || !ok {
		return nil, problemOf(orNoRunner(err, in.ID))
	}
	tokens, err := s.Roster.Tokens(p.Tenant)
	if err != nil {
		return nil, problemOf(err)
	}
	link := s.Runners.Link(shown.ID)
	detail.CreatedAt, detail.CreatedBy, detail.EnrolledAt, detail.RevokedAt = &kept.CreatedAt, kept.CreatedBy, kept.EnrolledAt, kept.RevokedAt
	detail.Certificate, detail.Next, detail.Dial = leafOf(kept.Current), leafOf(kept.Next), &link
	for _, t := range tokens {
		if t.RunnerID == shown.ID {
			detail.Tokens = append(detail.Tokens, RunnerToken{ID: t.ID, State: s.tokenState(ctx, t), CreatedAt: t.CreatedAt, ExpiresAt: t.ExpiresAt})
		}
	}
	return &runnerDetailOutput{detail}, nil
}

// orNoRunner is err, or that a runner went between two reads.
func orNoRunner(err error, idOrName string) error {
	if err == nil {
		return noRunner(idOrName)
	}
	return err
}

func leafOf(l *roster.Leaf) *RunnerLeaf {
	if l == nil {
		return nil
	}
	return &RunnerLeaf{Fingerprint: l.Fingerprint, NotBefore: l.NotBefore, NotAfter: l.NotAfter}
}

// tokenState is what has become of a token.
func (s *server) tokenState(ctx context.Context, t roster.Token) string {
	switch {
	case t.UsedAt != nil:
		return "used"
	case t.RevokedAt != nil:
		return "revoked"
	case !t.Live(time.Now()):
		return "expired"
	}
	if provable, err := s.Roster.Provable(ctx, t.ID); err == nil && !provable {
		return "lost"
	}
	return "live"
}

type editRunnerInput struct {
	ID   string `path:"id" doc:"Id or name of the runner" maxLength:"64"`
	Body struct {
		Name    *string           `json:"name,omitempty" doc:"DNS label, unique in the tenant"`
		Address *string           `json:"address,omitempty" doc:"host:port; the certificate stays valid"`
		Zone    *string           `json:"zone,omitempty" doc:"A change revokes the live token of a PENDING runner"`
		Labels  map[string]string `json:"labels,omitempty" doc:"All of them; {} removes them. A change revokes the live token of a PENDING runner"`
	}
}

type runnerOutput struct{ Body registry.Runner }

// RunnerEdited is a runner after a change.
type RunnerEdited struct {
	registry.Runner
	Warning string `json:"warning,omitempty" doc:"What is odd about the change, such as an address that another runner has"`
}

type editedOutput struct{ Body RunnerEdited }

func (s *server) editRunner(ctx context.Context, in *editRunnerInput) (*editedOutput, error) {
	if in.Body.Name != nil {
		if err := s.nameFree(principal(ctx), *in.Body.Name); err != nil {
			return nil, s.refused(principal(ctx), "runner.edit", "runner", in.ID, err)
		}
	}
	change := roster.Change{Name: in.Body.Name, Address: in.Body.Address, Zone: in.Body.Zone}
	if in.Body.Labels != nil {
		change.Labels = &in.Body.Labels
	}
	var kept roster.Runner
	out, err := s.changed(ctx, in.ID, func(by auth.Principal) (r roster.Runner, err error) {
		kept, err = s.Roster.Edit(ctx, by, in.ID, change)
		return kept, err
	})
	if err != nil {
		return nil, err
	}
	edited := &editedOutput{RunnerEdited{Runner: out.Body}}
	if in.Body.Address != nil {
		edited.Body.Warning = s.sameAddress(kept)
	}
	return edited, nil
}

func (s *server) revokeRunner(ctx context.Context, in *runnerID) (*runnerOutput, error) {
	return s.changed(ctx, in.ID, func(by auth.Principal) (roster.Runner, error) { return s.Roster.Revoke(ctx, by, in.ID) })
}

// changed answers with the runner as the list shows it after a change. The part that dials hears of it by itself.
func (s *server) changed(ctx context.Context, idOrName string, change func(auth.Principal) (roster.Runner, error)) (*runnerOutput, error) {
	r, err := change(principal(ctx))
	if err != nil {
		return nil, s.runnerProblem(ctx, idOrName, err)
	}
	shown, err := s.shown(r.Tenant, r.ID)
	if err != nil {
		return nil, problemOf(err)
	}
	return &runnerOutput{shown}, nil
}

func (s *server) removeRunner(ctx context.Context, in *runnerID) (*struct{}, error) {
	p := principal(ctx)
	if r, ok, err := s.Registry.Runner(p.Tenant, in.ID); err == nil && ok && r.Link == registry.LinkOutbound {
		if err := s.Registry.Remove(ctx, p, r.ID); err != nil {
			return nil, problemOf(err)
		}
		return nil, nil
	}
	if err := s.Roster.Remove(ctx, p, in.ID); err != nil {
		return nil, s.runnerProblem(ctx, in.ID, err)
	}
	return nil, nil
}

func (s *server) connectRunner(ctx context.Context, in *runnerID) (*runnerDetailOutput, error) {
	const action = "runner.connect"
	p := principal(ctx)
	id, err := s.diallable(p, in.ID)
	if err != nil {
		return nil, s.refused(p, action, "runner", cmp.Or(id, in.ID), err)
	}
	if err := s.done(ctx, p, action, "runner", id); err != nil {
		return nil, problemOf(err)
	}
	s.Runners.Connect(id)
	return s.getRunner(ctx, in)
}

// diallable is the id of the runner that idOrName means, if there is one, and why it is not dialled on by's request.
func (s *server) diallable(by auth.Principal, idOrName string) (id string, err error) {
	if err := s.Roster.Allowed(by); err != nil {
		return "", err
	}
	shown, err := s.shown(by.Tenant, idOrName)
	switch {
	case err != nil:
	case shown.Link == registry.LinkLocal:
		err = schemas.Errorf(schemas.CodeForbidden, "the Runink managed runner is the platform's own: it is not dialled on request")
	case shown.Link != registry.LinkDialled:
		err = schemas.Errorf(schemas.CodeConflict, "runner %q dials out by itself: it has no address to dial", idOrName).WithHint("start it on its host; `core-runner doctor` tells what is in the way")
	case shown.State == registry.StateRevoked:
		err = schemas.ErrRunnerRevoked(shown.Name)
	}
	return shown.ID, err
}

type tokenID struct {
	ID string `path:"id" doc:"tokenId of the answer that showed the ticket" maxLength:"64"`
}

func (s *server) revokeToken(ctx context.Context, in *tokenID) (*struct{}, error) {
	if err := s.Roster.RevokeToken(ctx, principal(ctx), in.ID); err != nil {
		return nil, problemOf(err)
	}
	return nil, nil
}

func (s *server) releaseRunner(ctx context.Context, in *runnerID) (*struct{}, error) {
	if err := s.Registry.ReleaseID(ctx, principal(ctx), in.ID); err != nil {
		return nil, problemOf(err)
	}
	return nil, nil
}

// RunnerHealth is what a runner's process says of itself (SPEC R7, C10). What isn't measured is named, never shown as zero.
type RunnerHealth struct {
	RunnerID    string     `json:"runnerId"`
	At          time.Time  `json:"at"`
	Source      string     `json:"source" doc:"Who says so: always runner claim" example:"runner claim"`
	InFlight    int        `json:"inFlight"`
	Limit       int        `json:"limit"`
	MemoryBytes *int64     `json:"memoryBytes,omitempty" doc:"Resident memory of the process"`
	Goroutines  int        `json:"goroutines"`
	StartedAt   *time.Time `json:"startedAt,omitempty"`
	Unmeasured  []string   `json:"unmeasured" doc:"Fields that are not measured"`
}

type runnerHealthOutput struct{ Body RunnerHealth }

func (s *server) getRunnerHealth(ctx context.Context, in *runnerID) (*runnerHealthOutput, error) {
	p := principal(ctx)
	if err := inTenant(p); err != nil {
		return nil, err
	}
	shown, err := s.shown(p.Tenant, in.ID)
	if err != nil {
		return nil, problemOf(err)
	}
	if shown.State == registry.StateRevoked {
		return nil, problemOf(schemas.ErrRunnerRevoked(shown.Name))
	}
	switch {
	case shown.State == registry.StatePending:
		return nil, problemOf(schemas.ErrNotEnrolled(shown.Name))
	case !shown.Health.Connected && shown.Link == registry.LinkDialled:
		return nil, problemOf(schemas.ErrDialledOffline(shown.Name, shown.Health.Detail))
	case !shown.Health.Connected && shown.Link == registry.LinkLocal:
		return nil, problemOf(schemas.ErrRunnerOffline(shown.Name, shown.Health.Detail).
			WithHint("nobody but the control plane starts it; a fetch on it has it started, or says why it can't be"))
	case !shown.Health.Connected:
		return nil, problemOf(schemas.ErrRunnerOffline(shown.Name, shown.Health.Detail))
	}
	ref := schemas.RunnerRef{Tenant: p.Tenant, Runner: shown.ID}
	reply, err := s.Runners.Order(ctx, ref, &runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Health{Health: &runbusv1.HealthOrder{}}})
	if err != nil {
		return nil, problemOf(err)
	}
	claim := reply.GetHealth()
	if claim == nil {
		return nil, problemOf(schemas.Errorf(schemas.CodeFailed, "runner %q told nothing of its health", shown.Name))
	}
	health := RunnerHealth{
		RunnerID: shown.ID, At: time.Now().UTC(), Source: "runner claim", InFlight: int(claim.GetInFlight()), Limit: int(claim.GetLimit()),
		Goroutines: int(claim.GetGoroutines()), Unmeasured: []string{"cpu"},
	}
	if bytes := claim.GetResidentBytes(); bytes > 0 {
		health.MemoryBytes = &bytes
	} else {
		health.Unmeasured = append(health.Unmeasured, "memoryBytes")
	}
	if claim.GetStartedAt().IsValid() {
		started := claim.GetStartedAt().AsTime()
		health.StartedAt = &started
	}
	return &runnerHealthOutput{health}, nil
}
