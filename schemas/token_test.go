package schemas_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/schemas"
)

func TestServiceTokenRoundTrip(t *testing.T) {
	token, public, err := schemas.NewServiceToken("acme")
	if err != nil {
		t.Fatal(err)
	}
	got, err := schemas.ParseServiceToken(token)
	if err != nil {
		t.Fatal(err)
	}
	if pub, err := got.Key.PublicKey(); err != nil || pub != public || got.Tenant != "acme" {
		t.Fatalf("got %q %q %v", got.Tenant, pub, err)
	}
}

func TestBadTokensDoNotShow(t *testing.T) {
	token, _, err := schemas.NewServiceToken("acme")
	if err != nil {
		t.Fatal(err)
	}
	seed := strings.TrimPrefix(token, "rsk1.acme.")
	for _, bad := range []string{
		"", "rsk1.", "rsk1.acme", "rsk1.acme.", token[:len(token)-1], token + "x", "rsk1.ACME." + seed, "rsk1.." + seed, "rsk2.acme." + seed,
		strings.ToLower(token), "rst1." + seed, "rsk1.none." + seed,
	} {
		_, err := schemas.ParseServiceToken(bad)
		if err == nil {
			t.Errorf("%d bytes of token were taken", len(bad))
			continue
		}
		if strings.Contains(err.Error(), seed[:8]) {
			t.Error("the error shows a part of the token")
		}
	}
}

func TestSessionTokens(t *testing.T) {
	token := schemas.NewSessionToken()
	if !schemas.IsSessionToken(token) || token == schemas.NewSessionToken() {
		t.Fatal("not a fresh session token")
	}
	a, err := schemas.SessionTokenHash(token)
	if err != nil || len(a) != 64 {
		t.Fatalf("%q %v", a, err)
	}
	for _, bad := range []string{"", "rst1.", token + "A", token[:len(token)-1], "rsk1." + token[5:], "rst1.!!!"} {
		if _, err := schemas.SessionTokenHash(bad); err == nil {
			t.Errorf("%d bytes of session token were taken", len(bad))
		}
	}
}

func FuzzParseServiceToken(f *testing.F) {
	f.Add("rsk1.acme.SUAAAA")
	f.Add("rsk1.")
	f.Fuzz(func(_ *testing.T, token string) {
		if got, err := schemas.ParseServiceToken(token); err == nil {
			got.Key.Wipe()
		}
	})
}

func FuzzSessionTokenHash(f *testing.F) {
	f.Add(schemas.NewSessionToken())
	f.Fuzz(func(t *testing.T, token string) {
		if h, err := schemas.SessionTokenHash(token); err == nil && (len(h) != 64 || !schemas.IsSessionToken(token)) {
			t.Fatal("a hash of what is no session token")
		}
	})
}

// The literals are what operators grep for: SPEC D3, D4, D7, E2, E3, E5.
func TestLiterals(t *testing.T) {
	for got, want := range map[string]string{
		schemas.ErrNoRunner().Message:                                   "no runner is selected",
		schemas.ErrOutcomeUnknown("edge-1", 10*time.Minute).Message:     `runner "edge-1" accepted the work and has not answered within 10m0s — the run may still be in progress there`,
		schemas.ErrOutcomeUnknown("edge-1", 5*time.Second).Message:      `runner "edge-1" accepted the work and has not answered within 5s — the run may still be in progress there`,
		schemas.ErrRegistryUnavailable(errors.New("no quorum")).Message: "runner registry unavailable",
		schemas.ErrPersonCannotEnrol().Message:                          "runner enrolment requires a service-account credential; a user session token cannot enrol a runner",
		schemas.ErrTokenMissing().Message:                               "❌ RUNNER_ENROLL_ADDR is set but RUNNER_ENROLL_TOKEN is empty — a runner enrols with a service-account token issued by IdentityService.GenerateServiceAccountKey; there is no anonymous enrolment",
		schemas.RoleControlPlaneText("face-runner:7102"):                "🧵 Fetch role: CONTROL-PLANE — forwards fetches to the dedicated runner at face-runner:7102 (never runs them here).",
		schemas.RoleRunnerText:                                          "🧵 Fetch role: RUNNER — executes the fetch pipeline in-process (dedicated compute).",
		schemas.EnrolmentText("cp:4222", "edge-1"):                      `🛰️  Outbound runner enrolment enabled: dialling cp:4222 (runner id "edge-1")`,
		schemas.ErrNotARunnerName().Message:                             "not a runner name (a DNS label, or `console` for the Runink managed runner)",
	} {
		if got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

func TestErrorsHaveTwoFaces(t *testing.T) {
	cause := errors.New("password=hunter2")
	err := schemas.ErrRegistryUnavailable(cause)
	if !errors.Is(err, cause) || !errors.Is(err, &schemas.Error{Code: schemas.CodeFailed}) {
		t.Fatal("cause or code is lost")
	}
	d := schemas.ToDetail(err)
	if strings.Contains(d.String(), "hunter2") {
		t.Fatal("the cause crossed the wire")
	}
	back := schemas.FromDetail(d)
	if schemas.CodeOf(back) != schemas.CodeFailed || back.Error() != "runner registry unavailable" {
		t.Fatalf("came back as %v", back)
	}
	if d := schemas.ToDetail(cause); strings.Contains(d.String(), "hunter2") || d.GetCode() != "failed" {
		t.Fatalf("an error without a code crossed as %v", d)
	}
	if schemas.FromDetail(nil) != nil || schemas.ToDetail(nil) != nil || schemas.CodeOf(nil) != "" {
		t.Fatal("nil is not nil")
	}
}
