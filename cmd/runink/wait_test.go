package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/schemas"
)

// A wait that is over has a status of its own, and says what is in the way and where to look.
func TestTheEndOfAWait(t *testing.T) {
	pending := runnerRow{ID: "r-1", Name: "warehouse", State: "PENDING"}
	active := runnerRow{ID: "r-1", Name: "warehouse", State: "ACTIVE"}
	for err, want := range map[error]bool{
		schemas.ErrRegistryUnavailable(nil):                          true,
		schemas.Errorf(schemas.CodeUnavailable, "an election"):       true,
		schemas.Errorf(schemas.CodeNotFound, "no runner"):            false,
		schemas.Errorf(schemas.CodeFailed, "it can't be reached"):    false,
		schemas.Errorf(schemas.CodeUnauthorized, "the token is bad"): false,
	} {
		if notNow(err) != want {
			t.Errorf("%v: the wait goes on: %v", err, !want)
		}
	}
	for _, c := range []struct {
		name  string
		err   error
		code  schemas.Code
		wants []string
	}{
		{"pending", errNotUp(pending, "not enrolled yet: nothing listens", time.Minute, true), "wait_timeout", []string{
			"runner warehouse does not take work after 1m0s: not enrolled yet: nothing listens", "core-runner doctor", "runink runner token warehouse", "runink runner show warehouse",
		}},
		{"active", errNotUp(active, "not connected", time.Minute, true), "wait_timeout", []string{"does not take work after 1m0s: not connected", "core-runner serve", "core-runner doctor"}},
		{"interrupted", errNotUp(active, "", time.Minute, false), "wait_interrupted", []string{"was interrupted", "does not take work yet\n"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out bytes.Buffer
			if status := report(&out, c.err, false); status != 4 {
				t.Errorf("status %d", status)
			}
			if code := schemas.CodeOf(c.err); code != c.code {
				t.Errorf("code %s, want %s", code, c.code)
			}
			for _, want := range c.wants {
				if !strings.Contains(out.String(), want) {
					t.Errorf("%q is not in %s", want, out.String())
				}
			}
		})
	}
}
