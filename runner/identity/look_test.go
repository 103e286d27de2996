package identity_test

import (
	"fmt"
	"maps"
	"os"
	"testing"
	"time"

	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/schemas"
)

// Who looks is told what a start would be told, beside the runner that holds the folder, and leaves everything as it was.
func TestWhoOnlyLooksSeesWhatAStartWouldSay(t *testing.T) {
	ca, id := newAuthority(t), schemas.NewRunnerID()
	mine, other, late := ca.ticket(id), ca.ticket(schemas.NewRunnerID()), ca.ticket(id)
	late.ExpiresAt = time.Now().Add(-time.Minute).UTC().Truncate(time.Second)
	stranger := newAuthority(t).ticket(id)
	tickets := map[string]*schemas.Ticket{"none": nil, "mine": &mine, "another's": &other, "late": &late, "another CA's": &stranger}
	for what, c := range map[string]struct {
		state identity.State
		make  func() string
	}{
		"missing": {identity.Empty, func() string { return folder(t) }},
		"empty":   {identity.Empty, t.TempDir},
		"pending": {identity.Pending, func() string {
			dir := folder(t)
			s := open(t, dir)
			noError(t, s.Begin(mine))
			noError(t, s.Close())
			return dir
		}},
		"enrolled": {identity.Enrolled, func() string {
			dir := enrolled(t, ca, id)
			write(t, dir, "key.pending.pem", "left by a renewal")
			return dir
		}},
		"revoked": {identity.Revoked, func() string {
			dir := folder(t)
			s := enrolledIn(t, dir, ca, id)
			noError(t, s.MarkRevoked("stolen"))
			noError(t, s.Close())
			return dir
		}},
	} {
		for with, ticket := range tickets {
			for _, now := range []time.Time{time.Now(), time.Now().Add(30 * 24 * time.Hour)} {
				dir := c.make()
				if what == "empty" {
					chmod(t, dir, 0o700)
				}
				before := map[string]os.FileMode{}
				if what != "missing" {
					before = files(t, dir)
				}
				f, err := identity.Look(dir)
				if err != nil || f.State() != c.state || f.Missing() != (what == "missing") {
					t.Fatalf("%s: %+v, %v", what, f, err)
				}
				seen := f.Admits(ticket, now)
				if what == "missing" {
					if _, err := os.Lstat(dir); !os.IsNotExist(err) {
						t.Errorf("it was made: %v", err)
					}
				} else {
					noError(t, f.Writable())
					if after := files(t, dir); !maps.Equal(before, after) {
						t.Errorf("%s: %v became %v", what, before, after)
					}
				}
				s := open(t, dir)
				if _, err := identity.Look(dir); err != nil || f.RunnerID() != s.RunnerID() {
					t.Errorf("%s, in use: %v", what, err)
				}
				_, said := s.Admit(ticket, now)
				if fmt.Sprint(seen, hintOf(seen)) != fmt.Sprint(said, hintOf(said)) {
					t.Errorf("%s, ticket %s: who looks sees %v, who starts %v", what, with, seen, said)
				}
				noError(t, s.Close())
			}
		}
	}
	dir := enrolled(t, ca, id)
	f, err := identity.Look(dir)
	noError(t, err)
	noError(t, os.RemoveAll(dir)) // its user may be root, whom no mode keeps from writing
	if err := f.Writable(); schemas.CodeOf(err) != schemas.CodeInvalid || hintOf(err) == "" {
		t.Errorf("a folder that can't be written: %v", err)
	}
}

func noError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
