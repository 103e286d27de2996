package enrol

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nkeys"

	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/schemas"
)

func newTokens(t testing.TB) *LinkTokens {
	t.Helper()
	key, err := nkeys.CreateAccount()
	if err != nil {
		t.Fatal(err)
	}
	return NewLinkTokens(key)
}

var linked = auth.LinkIdentity{
	Ref: schemas.RunnerRef{Tenant: "acme", Runner: schemas.NewRunnerID()}, Fingerprint: strings.Repeat("ab", 32),
}

// A link token says who the TLS handshake was with: at one server, for 10 s, once.
func TestALinkTokenIsTakenOnce(t *testing.T) {
	l := newTokens(t)
	now := time.Now()
	token, err := l.Sign(linked, "SERVER", now)
	if err != nil {
		t.Fatal(err)
	}
	if strings.ContainsAny(token, " \t\r\n\"") || len(token) > 1000 {
		t.Errorf("a token of %d bytes can't be a password", len(token))
	}
	refused := func(what, token, server string, at time.Time, by *LinkTokens) {
		t.Helper()
		_, err := by.Take(token, server, at)
		if err == nil {
			t.Errorf("%s was taken", what)
		} else if strings.Contains(err.Error(), token) {
			t.Errorf("%s: the error repeats it", what)
		}
	}
	refused("a token of another key", token, "SERVER", now, newTokens(t))
	refused("a token at another server", token, "OTHER", now, l)
	refused("a token of 10 s ago", token, "SERVER", now.Add(LinkTokenLife), l)
	refused("a token of the future", token, "SERVER", now.Add(-time.Minute), l)
	for i := range token {
		if token[i] == '.' {
			continue
		}
		changed := token[:i] + flip(token[i]) + token[i+1:]
		if got, err := newCopy(l).Take(changed, "SERVER", now); err == nil && got != linked {
			t.Fatalf("a token with another byte %d was taken, for %+v", i, got)
		}
	}
	got, err := l.Take(token, "SERVER", now.Add(LinkTokenLife-time.Millisecond))
	if err != nil || got != linked {
		t.Fatalf("taken as %+v: %v", got, err)
	}
	refused("a token that was used", token, "SERVER", now, l)
	for range 3 { // what is remembered of used ones ends with them
		if _, err := l.Take(mustSign(t, l, now.Add(time.Hour)), "SERVER", now.Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	if len(l.used) != 3 {
		t.Errorf("%d used tokens are remembered, 3 of them live", len(l.used))
	}
}

func mustSign(t *testing.T, l *LinkTokens, at time.Time) string {
	t.Helper()
	token, err := l.Sign(linked, "SERVER", at)
	if err != nil {
		t.Fatal(err)
	}
	return token
}

func newCopy(l *LinkTokens) *LinkTokens { return NewLinkTokens(l.key) }

func flip(c byte) string {
	if c == 'A' {
		return "B"
	}
	return "A"
}

func FuzzLinkToken(f *testing.F) {
	l := newTokens(f)
	now := time.Now()
	token, err := l.Sign(linked, "SERVER", now)
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range []string{token, auth.LinkTokenPrefix, auth.LinkTokenPrefix + ".", "rlt1.e30.AA", "", "rst1.x"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		who, err := newCopy(l).Take(s, "SERVER", now)
		if err == nil && who != linked {
			t.Errorf("%q was taken for %+v", s, who)
		}
	})
}
