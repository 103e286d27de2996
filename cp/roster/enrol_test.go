package roster

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/schemas"
)

func TestEnrolment(t *testing.T) {
	e := start(t, nil)
	runner, minted := e.create(t, "warehouse")
	key, tokenID, expires, err := e.r.Proof(t.Context(), runner.ID)
	must(t, err)
	if key != schemas.EnrolmentKey(minted.Token, runner.ID) || tokenID != minted.TokenID || !expires.Equal(minted.ExpiresAt) {
		t.Errorf("proof of %s until %s", tokenID, expires)
	}
	first := claim(runner, minted, "k")
	certificate, again, err := e.r.Consume(t.Context(), first)
	if err != nil || again || string(certificate) != "certificate of k" {
		t.Fatalf("%q, %v, %v", certificate, again, err)
	}
	now := e.byID(t, runner.ID)
	if now.State != Active || now.Current == nil || now.Current.Fingerprint != first.Leaf.Fingerprint || now.EnrolledAt == nil {
		t.Errorf("enrolled %+v", now)
	}
	// The reply was lost: the proof is still there, and the same key gets the same certificate, though the claim has a new one.
	if _, tokenID, _, err := e.r.Proof(t.Context(), runner.ID); err != nil || tokenID != minted.TokenID {
		t.Errorf("the proof after the use: %s, %v", tokenID, err)
	}
	retry := first
	retry.CertificatePEM, retry.Leaf = []byte("another certificate of k"), leaf("another")
	certificate, again, err = e.r.Consume(t.Context(), retry)
	if err != nil || !again || string(certificate) != "certificate of k" || e.byID(t, runner.ID).Current.Fingerprint != first.Leaf.Fingerprint {
		t.Errorf("the same key again: %q, %v, %v", certificate, again, err)
	}
	// Another key is a double use, which the audit names.
	if _, _, err := e.r.Consume(t.Context(), claim(runner, minted, "thief")); !errors.Is(err, ErrTokenUsed) {
		t.Errorf("another key: %v", err)
	}
	events := e.events(t, "runner.enrol")
	if len(events) != 3 {
		t.Fatalf("audited %v", events)
	}
	if d := events[0].GetDetails(); events[0].GetOutcome() != "ok" || d["certificate"] != first.Leaf.Fingerprint || d["token"] != minted.TokenID {
		t.Errorf("the enrolment: %v", events[0])
	}
	if events[1].GetOutcome() != "ok" || events[1].GetDetails()["again"] == "" {
		t.Errorf("the same key again: %v", events[1])
	}
	if events[2].GetOutcome() != "forbidden" || !strings.Contains(events[2].GetDetails()["reason"], "double use") {
		t.Errorf("the double use: %v", events[2])
	}
}

func TestWhatConsumeRefuses(t *testing.T) {
	e := start(t, nil)
	runner, minted := e.create(t, "warehouse")
	second, theirs := e.create(t, "second")
	swapped := claim(runner, theirs, "k")
	if _, _, err := e.r.Consume(t.Context(), swapped); !errors.Is(err, ErrTokenEnded) {
		t.Errorf("another runner's token: %v", err)
	}
	nobody := claim(runner, minted, "k")
	nobody.RunnerID = schemas.NewRunnerID()
	_, _, err := e.r.Consume(t.Context(), nobody)
	wantCode(t, "no runner", err, schemas.CodeNotFound, "no dialled runner")
	_, err = e.r.Revoke(t.Context(), e.ada, second.ID)
	must(t, err)
	_, _, err = e.r.Consume(t.Context(), claim(second, theirs, "k"))
	wantCode(t, "a revoked runner", err, schemas.CodeRunnerRevoked, "was revoked")
	e.clock.advance(TicketLife)
	if _, _, err := e.r.Consume(t.Context(), claim(runner, minted, "k")); !errors.Is(err, ErrTokenEnded) {
		t.Errorf("an expired token: %v", err)
	}
	if _, _, _, err := e.r.Proof(t.Context(), runner.ID); !errors.Is(err, ErrNoProof) {
		t.Errorf("its proof: %v", err)
	}
	if now := e.byID(t, runner.ID); now.State != Pending || e.token(t, minted.TokenID).UsedAt != nil {
		t.Errorf("a refusal changed something: %+v", now)
	}
}

// The proof key lives in memory only: without it the token can't be proven, and a new one can (SPEC C3).
func TestProofsGoWithTheMemory(t *testing.T) {
	e := start(t, nil)
	runner, _ := e.create(t, "warehouse")
	js, err := natsjs.New(e.Conn(t, embedded.UserSec))
	must(t, err)
	stream, err := js.Stream(t.Context(), "KV_runbus_proofs")
	must(t, err)
	if stream.CachedInfo().Config.Storage != natsjs.MemoryStorage {
		t.Error("proof keys are on the disk")
	}
	must(t, stream.Purge(t.Context()))
	if _, _, _, err := e.r.Proof(t.Context(), runner.ID); !errors.Is(err, ErrNoProof) {
		t.Errorf("proof: %v", err)
	}
	_, minted, err := e.r.Mint(t.Context(), e.ada, runner.ID)
	must(t, err)
	if key, _, _, err := e.r.Proof(t.Context(), runner.ID); err != nil || key != schemas.EnrolmentKey(minted.Token, runner.ID) {
		t.Errorf("proof of the new token: %v", err)
	}
}

func TestPromotion(t *testing.T) {
	e := start(t, nil)
	runner := e.enrolled(t, "warehouse")
	old := runner.Current.Fingerprint
	next, later := leaf("next"), leaf("later")
	if err := e.r.SetNext(t.Context(), runner.ID, next.Fingerprint, later); !errors.Is(err, ErrNotCurrent) {
		t.Errorf("from a leaf that it doesn't have: %v", err)
	}
	must(t, e.r.SetNext(t.Context(), runner.ID, old, next))
	must(t, e.r.SetNext(t.Context(), runner.ID, old, later)) // the first one got lost
	if _, err := e.r.Promote(t.Context(), runner.ID, next.Fingerprint); !errors.Is(err, ErrNotCurrent) {
		t.Errorf("promoting what was replaced: %v", err)
	}
	promoted, err := e.r.Promote(t.Context(), runner.ID, later.Fingerprint)
	must(t, err)
	if promoted.Current.Fingerprint != later.Fingerprint || promoted.Next != nil {
		t.Errorf("promoted %+v", promoted)
	}
	if again, err := e.r.Promote(t.Context(), runner.ID, later.Fingerprint); err != nil || again.Current.Fingerprint != later.Fingerprint {
		t.Errorf("again: %v", err)
	}
	if _, err := e.r.Promote(t.Context(), runner.ID, old); !errors.Is(err, ErrNotCurrent) {
		t.Errorf("the old leaf: %v", err)
	}
	events := e.events(t, "runner.certificate.promote")
	if len(events) != 3 || events[1].GetDetails()["old"] != old || events[1].GetDetails()["certificate"] != later.Fingerprint {
		t.Errorf("audited %v", events)
	}
}

// Of 50 claims with keys of their own, over several replicas, one wins and 49 are double uses.
func TestOneWinnerOfFiftyClaims(t *testing.T) {
	e := start(t, nil)
	runner, minted := e.create(t, "warehouse")
	replicas := []*Roster{e.r}
	for range 4 {
		replicas = append(replicas, e.replica(t, nil))
	}
	const claims = 50
	var won, used atomic.Int32
	var unavailable atomic.Int32 // attempts, which may have taken effect or be in the audit all the same
	var winner atomic.Value
	var all sync.WaitGroup
	for i := range claims {
		all.Go(func() {
			c := claim(runner, minted, fmt.Sprint("key ", i))
			tries := 1
			certificate, again, err := replicas[i%len(replicas)].Consume(t.Context(), c)
			for ; schemas.CodeOf(err) == schemas.CodeUnavailable && tries <= mostAgain; tries++ { // a busy machine's: who is told so asks again
				unavailable.Add(1)
				certificate, again, err = replicas[i%len(replicas)].Consume(t.Context(), c)
			}
			switch {
			case err == nil && (!again || tries > 1) && string(certificate) == string(c.CertificatePEM):
				won.Add(1)
				winner.Store(c.Leaf.Fingerprint)
			case errors.Is(err, ErrTokenUsed):
				used.Add(1)
			default:
				t.Errorf("claim %d: %q, %v, %v", i, certificate, again, err)
			}
		})
	}
	all.Wait()
	if won.Load() != 1 || used.Load() != claims-1 {
		t.Fatalf("%d won, %d were told that the token was used", won.Load(), used.Load())
	}
	row, err := e.r.docs.Get(t.Context(), acme)
	must(t, err)
	if r := row.Value.runner(runner.ID); r.State != Active || r.Current.Fingerprint != winner.Load() {
		t.Errorf("stored %+v, won %v", r, winner.Load())
	}
	double := 0
	for _, event := range e.events(t, "runner.enrol") {
		if strings.Contains(event.GetDetails()["reason"], "double use") {
			double++
		}
	}
	if double < claims-1 || double > claims-1+int(unavailable.Load()) {
		t.Errorf("%d double uses are audited, after %d attempts that the registry had no time for", double, unavailable.Load())
	}
}

func TestExpired(t *testing.T) {
	now := time.Now()
	for text, current := range map[string]*Leaf{
		"":                    nil,
		"certificate expired": {NotAfter: now.Add(-time.Hour)},
		"certificate expired: revoke and create again": {NotAfter: now.Add(-RenewableFor - time.Second)},
	} {
		if got := (Runner{Current: current}).Expired(now); !strings.HasPrefix(got, text) || (got == "") != (text == "") {
			t.Errorf("%q, want %q", got, text)
		}
	}
	if got := (Runner{Current: &Leaf{NotAfter: now.Add(time.Second)}}).Expired(now); got != "" {
		t.Errorf("a valid one: %q", got)
	}
}
