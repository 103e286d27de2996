package roster

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/schemas"
)

// R1: 20 racing writers on three replicas, each until it is told of the limit, make exactly as many runners as a tenant may have.
func TestLimitsUnderRacingWriters(t *testing.T) {
	e := start(t, nil)
	replicas := []*Roster{e.r, e.replica(t, nil), e.replica(t, nil)}
	const writers = 20
	var made sync.Map
	var all sync.WaitGroup
	for w := range writers {
		all.Go(func() {
			for i := 0; t.Context().Err() == nil; i++ {
				runner, _, err := replicas[w%len(replicas)].Create(t.Context(), e.ada, spec(fmt.Sprintf("r%d-%d", w, i)))
				switch code := schemas.CodeOf(err); {
				case err == nil:
					made.Store(runner.ID, true)
				case code == schemas.CodeLimit && strings.Contains(err.Error(), "at most 100 dialled runners"):
					return
				case code != schemas.CodeUnavailable && code != schemas.CodeConflict: // those are a busy machine's
					t.Errorf("writer %d: %v", w, err)
					return
				}
			}
		})
	}
	all.Wait()
	row, err := e.r.docs.Get(t.Context(), acme)
	must(t, err)
	if len(row.Value.Runners) != MaxRunners || len(row.Value.Tokens) != MaxRunners {
		t.Errorf("%d runners and %d tokens are stored", len(row.Value.Runners), len(row.Value.Tokens))
	}
	stored := map[any]bool{}
	for _, r := range row.Value.Runners {
		stored[r.ID] = true
	}
	made.Range(func(id, _ any) bool {
		if !stored[id] {
			t.Errorf("%s was made and is not stored", id)
		}
		return true
	})
	// A revoked one counts until it is removed.
	name := row.Value.Runners[0].Name
	_, err = e.r.Revoke(t.Context(), e.ada, name)
	must(t, err)
	_, _, err = e.r.Create(t.Context(), e.ada, spec("one-more"))
	wantCode(t, "beside a revoked one", err, schemas.CodeLimit, "at most 100 dialled runners")
	must(t, e.r.Remove(t.Context(), e.ada, name))
	e.create(t, "one-more")
}

func TestLimitsOfADocument(t *testing.T) {
	now := time.Now()
	live := func(n int) (tokens []Token) {
		for range n {
			tokens = append(tokens, Token{ID: schemas.NewID(), RunnerID: schemas.NewRunnerID(), SHA256: hashOf([32]byte{}), CreatedAt: now, ExpiresAt: now.Add(TicketLife)})
		}
		return tokens
	}
	full := func(labels int, value string) (runners []Runner) {
		for i := range MaxRunners {
			r := Runner{ID: schemas.NewRunnerID(), Tenant: acme, Name: strings.Repeat("n", 60) + strconv.Itoa(i), Address: strings.Repeat("h", 60) + ":7443", State: Pending, CreatedAt: now, CreatedBy: "person:ada", Labels: map[string]string{}}
			for l := range labels {
				r.Labels[fmt.Sprint(strings.Repeat("l", 60), l)] = value
			}
			runners = append(runners, r)
		}
		return runners
	}
	ended := live(200)
	for i := range ended {
		if i%2 == 0 {
			ended[i].UsedAt = &now
		} else {
			ended[i].ExpiresAt = now
		}
	}
	for what, c := range map[string]struct {
		doc  document
		text string // "": within
	}{
		"empty":               {document{}, ""},
		"all at their limits": {document{Runners: full(8, strings.Repeat("v", 100)), Tokens: live(100)}, ""},
		"used and expired":    {document{Runners: full(0, ""), Tokens: append(ended, live(100)...)}, ""},
		"101 runners":         {document{Runners: append(full(0, ""), Runner{})}, "at most 100 dialled runners"},
		"101 live tokens":     {document{Tokens: live(101)}, "at most 100 live enrolment tokens"},
		"nine labels":         {document{Runners: full(9, "")[:1]}, "at most 8 labels"},
		"too large":           {document{Runners: full(8, strings.Repeat("<", 100))}, "at most 512 KiB"},
	} {
		if body, err := json.Marshal(c.doc); err != nil || len(body) > c.doc.atMost() {
			t.Errorf("%s: %d bytes of at most %d, %v", what, len(body), c.doc.atMost(), err)
		}
		err := c.doc.limits(now)
		if c.text == "" && err != nil || c.text != "" && (schemas.CodeOf(err) != schemas.CodeLimit || !strings.Contains(err.Error(), c.text)) {
			t.Errorf("%s: %v, want %q", what, err, c.text)
		}
	}
}

// Every replica tells of every change, after its reads know it.
func TestChangesAreTold(t *testing.T) {
	e := start(t, nil)
	far := e.replica(t, nil)
	told := make(chan Runner, 16)
	far.OnChange(func(r Runner) {
		if now, ok, err := far.ByID(r.ID); err == nil && ok && !now.equal(r) {
			t.Errorf("told of %+v, and reads give %+v", r, now)
		}
		told <- r
	})
	next := func() Runner {
		t.Helper()
		select {
		case r := <-told:
			return r
		case <-time.After(2 * time.Minute):
			t.Fatal("no change was told")
			return Runner{}
		}
	}
	runner, _ := e.create(t, "warehouse")
	if got := next(); got.ID != runner.ID || got.State != Pending {
		t.Errorf("created: %+v", got)
	}
	address := "h:1"
	_, err := e.r.Edit(t.Context(), e.ada, runner.ID, Change{Address: &address})
	must(t, err)
	if got := next(); got.Address != "h:1" {
		t.Errorf("moved: %+v", got)
	}
	_, _, err = e.r.Mint(t.Context(), e.ada, runner.ID) // changes no runner
	must(t, err)
	_, minted, err := e.r.Mint(t.Context(), e.ada, runner.ID)
	must(t, err)
	_, _, err = e.r.Consume(t.Context(), claim(runner, minted, "k"))
	must(t, err)
	if got := next(); got.State != Active || got.Current == nil {
		t.Errorf("enrolled: %+v", got)
	}
	_, err = e.r.Revoke(t.Context(), e.ada, runner.ID)
	must(t, err)
	if got := next(); got.State != Revoked {
		t.Errorf("revoked: %+v", got)
	}
	must(t, e.r.Remove(t.Context(), e.ada, runner.ID))
	if got := next(); got.ID != runner.ID || got.State != Revoked {
		t.Errorf("removed: %+v", got)
	}
}

// What is read is not what is kept: a caller may change it.
func TestReadsAreCopies(t *testing.T) {
	e := start(t, nil)
	runner, _, err := e.r.Create(t.Context(), e.ada, Spec{Name: "warehouse", Address: "h:1", Labels: map[string]string{"a": "b"}})
	must(t, err)
	runner.Labels["a"] = "x"
	for range 2 {
		list, err := e.r.Runners(acme)
		must(t, err)
		if list[0].Labels["a"] != "b" {
			t.Fatal("a caller changed the roster")
		}
		list[0].Labels["a"] = "x"
	}
}

// A registry that can't be read is that, and never an empty one (SPEC R1).
func TestStaleReadsFail(t *testing.T) {
	e := start(t, func(d *Deps) { d.StaleAfter = 6 * time.Second })
	runner, _ := e.create(t, "warehouse")
	js, err := natsjs.New(e.Conn(t, embedded.UserSec))
	must(t, err)
	must(t, js.DeleteStream(t.Context(), "KV_runbus_registry"))
	give := time.Now().Add(2 * time.Minute)
	for e.r.Readable() == nil && time.Now().Before(give) {
		<-time.After(20 * time.Millisecond)
	}
	want := schemas.ErrRegistryUnavailable(nil)
	_, err1 := e.r.Runners(acme)
	_, err2 := e.r.Tokens(acme)
	_, _, err3 := e.r.ByID(runner.ID)
	_, _, err4 := e.r.Find(acme, "warehouse")
	_, err5 := e.r.All()
	for i, err := range []error{err1, err2, err3, err4, err5} {
		if !errors.Is(err, want) {
			t.Errorf("read %d: %v", i, err)
		}
	}
	_, _, err = e.r.Create(t.Context(), e.ada, spec("another"))
	wantCode(t, "a change", err, schemas.CodeUnavailable, "runner registry unavailable")
}
