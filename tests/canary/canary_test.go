package canary

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nkeys"

	"github.com/org-runink/runbus/schemas"
)

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// sample is one credential of a kind, as it is handed over, and the bytes in it that are the secret.
type sample struct {
	kind, text string
	core       []byte
}

func samples(t testing.TB) []sample {
	t.Helper()
	token, _, err := schemas.NewServiceToken("acme")
	if err != nil {
		t.Fatal(err)
	}
	seed := token[strings.LastIndexByte(token, '.')+1:]
	_, seedBytes, err := nkeys.DecodeSeed([]byte(seed))
	if err != nil {
		t.Fatal(err)
	}
	pair, err := nkeys.CreateAccount()
	if err != nil {
		t.Fatal(err)
	}
	account, err := pair.Seed()
	if err != nil {
		t.Fatal(err)
	}
	_, accountBytes, err := nkeys.DecodeSeed(account)
	if err != nil {
		t.Fatal(err)
	}
	session := schemas.NewSessionToken()
	sessionBytes := must(base64.RawURLEncoding.DecodeString(session[len(schemas.SessionTokenPrefix):]))(t)
	paper := schemas.Ticket{RunnerID: schemas.NewRunnerID(), Name: "edge", ExpiresAt: time.Now().Add(time.Minute)}
	_, _ = rand.Read(paper.Token[:])
	_, _ = rand.Read(paper.CASHA256[:])
	proof := schemas.EnrolmentKey(paper.Token, paper.RunnerID)
	curve := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	_, edwards, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return []sample{
		{"runner token", token, seedBytes}, {"seed", string(account), accountBytes}, {"session token", session, sessionBytes},
		{"ticket", paper.Encode(), paper.Token[:]}, {ProofKey, paper.Encode(), proof[:]},
		{"private key", inPEM(t, curve), must(curve.Bytes())(t)}, {"private key", inPEM(t, edwards), edwards.Seed()},
	}
}

func inPEM(t testing.TB, key any) string {
	t.Helper()
	return string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: must(x509.MarshalPKCS8PrivateKey(key))(t)}))
}

// leaks are ways in which a text gets somewhere.
func leaks(text string) map[string]string {
	asJSON, _ := json.Marshal(map[string]string{"a": text})
	var logged bytes.Buffer
	slog.New(slog.NewTextHandler(&logged, nil)).Info("x", "a", text)
	slog.New(slog.NewJSONHandler(&logged, nil)).Info(text)
	out := map[string]string{
		"as it is": text, "JSON": string(asJSON), "log": logged.String(), "%q": fmt.Sprintf("%q", text), "%x": fmt.Sprintf("%x", text), "%X": fmt.Sprintf("%X", text), "% x": fmt.Sprintf("% x", text),
		"%v of bytes": fmt.Sprintf("%v", []byte(text)), "%#v of bytes": fmt.Sprintf("%#v", []byte(text)), "query": url.QueryEscape(text), "path": url.PathEscape(text),
		"JSON of bytes": must2(json.Marshal([]byte(text))), "user information": url.UserPassword("me", text).String(),
	}
	for shift := range 3 {
		before := strings.Repeat("u", 3+shift)
		for name, e := range map[string]*base64.Encoding{"std": base64.StdEncoding, "url": base64.URLEncoding, "raw std": base64.RawStdEncoding, "raw url": base64.RawURLEncoding} {
			out[fmt.Sprintf("base64 %s, %d", name, shift)] = e.EncodeToString([]byte(before + text + "and more"))
		}
	}
	return out
}

func must2(b []byte, _ error) string { return string(b) }

func has(hits []Hit, kind string) bool {
	for _, h := range hits {
		if h.Kind == kind {
			return true
		}
	}
	return false
}

// Each credential, and the bytes in it, is found however it is written, wherever it stands, and whole or cut.
func TestEveryForm(t *testing.T) {
	for _, c := range samples(t) {
		t.Run(c.kind, func(t *testing.T) {
			s := New()
			s.Learn("here", []byte("first "+c.text+" last"))
			for what, text := range map[string]string{"the credential": c.text, "the secret in it": string(c.core)} {
				for form, leak := range leaks(text) {
					switch {
					case c.kind == ProofKey && what == "the credential": // it is not in the ticket, but follows from it
						continue
					case what != "the credential" && (form == "JSON" || form == "log"): // of bytes that are no UTF-8 these keep nothing
						continue
					}
					if hits := s.Find([]byte("some text before it "+leak+" and behind"), nil); !has(hits, c.kind) {
						t.Errorf("%s: %s is not found", what, form)
					}
				}
			}
			if lines := strings.Split(c.text, "\n"); c.kind == "private key" && !has(s.Find([]byte(lines[1]), nil), c.kind) {
				t.Error("its first line is not found")
			}
			if len(c.text) < 100 && !has(s.Find([]byte(c.text[:len(c.text)*3/4]), nil), c.kind) {
				t.Error("three quarters of it are not found")
			}
			if hits := s.Find([]byte(strings.Repeat("nothing at all, SUAAAA rst1. crt1.AAAA -----BEGIN CERTIFICATE-----\n", 50)), nil); len(hits) > 0 {
				t.Errorf("found where it is not: %v", hits)
			}
			if hits := s.Find([]byte(c.text), func(is Secret) bool { return is.Born == "here" }); len(hits) > 0 {
				t.Errorf("where it may be: %v", hits)
			}
			if hits := New().Find([]byte("x"+c.text), nil); c.kind != "seed" && len(hits) == 0 {
				t.Error("not known before, it is not recognised")
			}
		})
	}
}

// What has no form of its own is found once it is added.
func TestAdded(t *testing.T) {
	s := New()
	secret := "pa ss\"w<ö>rd+%/1"
	s.Add("database password", "a test", []byte(secret), Text)
	s.Add("too short", "a test", []byte("abc"), Text)
	for form, leak := range leaks(secret) {
		if !has(s.Find([]byte("x"+leak), nil), "database password") {
			t.Errorf("%s is not found", form)
		}
	}
	if s.Len() != 1 || len(s.Find([]byte("abc abc"), nil)) != 0 {
		t.Error("what is too short was taken")
	}
}

// A stream is looked at across its parts, whatever their size, and each secret is told once.
func TestWriter(t *testing.T) {
	s := New()
	secret := bytes.Repeat([]byte("0123456789abcdef"), 4)
	s.Add("secret", "a test", secret, Random)
	for _, part := range []int{1, 7, 1000, 1 << 20} {
		w := s.NewWriter(nil)
		stream := append(append(bytes.Repeat([]byte{'.'}, 4*overlap-30), secret...), bytes.Repeat([]byte{'.'}, 5*overlap)...)
		for len(stream) > 0 {
			n := min(part, len(stream))
			_, _ = w.Write(stream[:n])
			stream = stream[n:]
		}
		if hits := w.Hits(); len(hits) != 1 || hits[0].Kind != "secret" {
			t.Errorf("in parts of %d: %v", part, hits)
		}
	}
}

// Whatever the text, it is read, and what was learned from it is found in it.
func FuzzLearn(f *testing.F) {
	for _, c := range samples(f) {
		f.Add([]byte(c.text))
	}
	f.Add([]byte("-----BEGIN PRIVATE KEY-----\n-----END PRIVATE KEY-----\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		s := New()
		s.Learn("here", text)
		if s.Len() > 0 && len(s.Find(text, nil)) == 0 {
			t.Fatal("what was learned is not found")
		}
	})
}

func BenchmarkFind(b *testing.B) {
	s := New()
	for range 100 {
		for _, c := range samples(b) {
			s.Learn("here", []byte(c.text))
		}
	}
	log := bytes.Repeat([]byte("time=2026-01-01T00:00:00Z level=INFO msg=the runner has enrolled runner=edge session=0123456789abcdef\n"), 10_000)
	b.SetBytes(int64(len(log)))
	for b.Loop() {
		if hits := s.Find(log, nil); len(hits) > 0 {
			b.Fatal(hits)
		}
	}
}
