package schemas_test

import (
	"strings"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

func TestRunnerIDs(t *testing.T) {
	for _, id := range []string{"a", "a.b", "Edge-01_x.y", strings.Repeat("x", 64), ".", "-", "console2"} {
		if err := schemas.ValidRunnerID(id); err != nil {
			t.Errorf("%q: %v", id, err)
		}
	}
	for id, text := range map[string]string{
		"":                      "empty",
		strings.Repeat("x", 65): "65 characters",
		"*":                     `'*'`,
		">":                     `'>'`,
		"a b":                   `' '`,
		"a\x00b":                `'\x00'`,
		"a\nb":                  `'\n'`,
		"rünner":                `'ü'`,
		"a/b":                   `'/'`,
		"a=2Eb":                 `'='`,
		"rst1.abc":              "looks like a token",
		"rsk1.abc":              "looks like a token",
		"crt1.abc":              "looks like a token",
	} {
		err := schemas.ValidRunnerID(id)
		if err == nil || !strings.Contains(err.Error(), text) || schemas.CodeOf(err) != schemas.CodeInvalid {
			t.Errorf("%q: %v, want an error with %q", id, err, text)
		}
	}
}

func TestNames(t *testing.T) {
	for _, name := range []string{"edge", "a", "a-1", strings.Repeat("x", 63)} {
		if err := schemas.ValidName("key name", name); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	for name, text := range map[string]string{
		"": "empty", "admin": "reserved", "root": "reserved", "system": "reserved", "console": "reserved",
		"A": "not a DNS label", "-a": "not a DNS label", "a-": "not a DNS label", "a.b": "not a DNS label", strings.Repeat("x", 64): "not a DNS label",
		"rst1.canary": "looks like a token",
	} {
		if err := schemas.ValidName("key name", name); err == nil || !strings.Contains(err.Error(), text) || strings.Contains(err.Error(), "canary") {
			t.Errorf("%q: %v, want an error with %q", name, err, text)
		}
	}
	if err := schemas.ValidTenant(schemas.NoTenant); err == nil {
		t.Error("the tenant of nobody is a valid tenant")
	}
}

func TestConnectNames(t *testing.T) {
	id, nonce, err := schemas.ParseConnectName("a.b/n0nce")
	if err != nil || id != "a.b" || nonce != "n0nce" {
		t.Fatalf("got %q %q %v", id, nonce, err)
	}
	for _, name := range []string{"", "a", "/n", "a/", "a/*", "*/n", ">/n", "a b/n", "a/b/n", "a/n.n", strings.Repeat("x", 65) + "/n"} {
		if _, _, err := schemas.ParseConnectName(name); err == nil {
			t.Errorf("%q was taken", name)
		}
	}
}
