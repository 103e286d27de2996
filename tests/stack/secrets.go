package stack

import (
	"bufio"
	"bytes"
	"encoding/json"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/org-runink/runbus/tests/canary"
)

// Secrets are those that came up in this run of tests: tokens, tickets, seeds, private keys, what fetches open their sources with, logins of
// proxies. What the processes of this package, and those that they start, write, answer, store and show is searched for them, always: see
// Process.inspect. A test that gives a process a secret in a way of its own adds it.
var Secrets = canary.New()

// Inspect fails the test for each secret in text, which came out at sink, but for those that allow (nil: none) says may be there. It names
// the kind of the secret, never the secret.
func Inspect(t testing.TB, sink string, text []byte, allow func(canary.Secret) bool) {
	t.Helper()
	report(t, sink, Secrets.Find(text, allow))
}

// report fails the test for what was found.
func report(t testing.TB, sink string, hits []canary.Hit) {
	t.Helper()
	if len(Secrets.Find([]byte(sink), nothing)) > 0 {
		sink = "a place whose name has one in it"
	}
	told := map[canary.Secret]bool{}
	for _, hit := range hits {
		if told[hit.Secret] {
			continue // another part of the same one
		}
		told[hit.Secret] = true
		t.Errorf("LEAK %s in %s (%s, first seen in %s)", hit.Kind, sink, hit.Form, hit.Born)
	}
}

// nothing is what may be shown where nothing may.
var nothing func(canary.Secret) bool

// learnEnvironment makes the secrets of an environment known.
func learnEnvironment(name string, env map[string]string) {
	for variable, value := range env {
		born := variable + " of " + name
		Secrets.Learn(born, []byte(value))
		if strings.HasSuffix(strings.ToUpper(variable), "_PROXY") {
			if u, err := url.Parse(value); err == nil {
				if password, set := u.User.Password(); set {
					Secrets.Add("proxy login", born, []byte(password), canary.Text)
				}
			}
		}
		if strings.HasPrefix(variable, "OTEL_") && strings.HasSuffix(variable, "HEADERS") {
			for pair := range strings.SplitSeq(value, ",") {
				_, header, _ := strings.Cut(pair, "=")
				if plain, err := url.PathUnescape(strings.TrimSpace(header)); err == nil {
					Secrets.Add("collector header", born, []byte(plain), canary.Text)
				}
			}
		}
	}
}

// learnSecrets makes known what a fetch opens its source with: a JSON object, or KEY=VALUE lines.
func learnSecrets(born string, text []byte) {
	Secrets.Learn(born, text)
	var object map[string]string
	if json.Unmarshal(text, &object) == nil {
		for _, value := range object {
			Secrets.Add("source secret", born, []byte(value), canary.Text)
		}
		return
	}
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		if _, value, ok := strings.Cut(lines.Text(), "="); ok {
			Secrets.Add("source secret", born, []byte(value), canary.Text)
		}
	}
}

// learnCall makes the secrets in the body of a call known.
func learnCall(body []byte) {
	Secrets.Learn("a call", body)
	var call struct {
		Secrets map[string]string `json:"secrets"`
	}
	if json.Unmarshal(body, &call) == nil {
		for _, value := range call.Secrets {
			Secrets.Add("source secret", "a call", []byte(value), canary.Text)
		}
	}
}

// learnInputs makes known what a process is given to open a source with: the file that its command line names, or its standard input.
func learnInputs(name string, args []string, stdin []byte) {
	born := "standard input of " + name
	Secrets.Learn(born, stdin)
	for i, arg := range args {
		if i == 0 || args[i-1] != "--secrets-file" {
			continue
		}
		if arg == "-" {
			learnSecrets(born, stdin)
		} else if body, err := os.ReadFile(arg); err == nil {
			learnSecrets("secrets file of "+name, body)
		}
	}
}

// private is the files that are there to keep secrets, by the end of their path. Whoever makes one makes it for its owner alone.
var private = []string{
	"bus-keys.json", "keys.json", ".token", "ops.nk", "ops-sys.nk", "tls/server.key", "tls/ca.key", "runner-ca/ca.key", // of a control plane
	"identity.pem", "key.pending.pem", // of a dialled runner
	"runink/context.json", // of the command line
}

// isPrivate reports whether path is such a file, or what a crash left of making it (durable.Create).
func isPrivate(path string) bool {
	path = filepath.ToSlash(path)
	if base := filepath.Base(path); strings.HasPrefix(base, ".") {
		path = filepath.ToSlash(filepath.Join(filepath.Dir(path), strings.TrimRight(base[1:], ".0123456789")))
	}
	return slices.ContainsFunc(private, func(end string) bool { return strings.HasSuffix(path, end) })
}

// shows reports whether a command line is one that shows a secret once: the one that it makes.
func shows(args []string) bool {
	var words []string
	for _, a := range args {
		if !strings.HasPrefix(a, "-") {
			words = append(words, a)
		}
	}
	if len(words) < 2 {
		return false
	}
	switch strings.Join(words[:2], " ") {
	case "key create", "runner create", "runner token", "user create", "user renew", "tenant create":
		return true
	}
	return false
}
