package embedded

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nkeys"

	"github.com/org-runink/runbus/schemas"
)

// seedForm matches any nkey seed.
var seedForm = regexp.MustCompile(`S[A-Z][A-Z2-7]{40,}`)

func loadKeys(t testing.TB) *Keys {
	t.Helper()
	k, err := LoadKeys(filepath.Join(t.TempDir(), "keys.json"))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestKeysAreMadeOnceAndPrivate(t *testing.T) {
	file := filepath.Join(t.TempDir(), "deep", "keys.json")
	first, err := LoadKeys(file)
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v, want 0600", info.Mode(), err)
	}
	second, err := LoadKeys(file)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for name := range kinds() {
		if first.public(name) == "" || first.public(name) != second.public(name) {
			t.Errorf("%s: %q became %q", name, first.public(name), second.public(name))
		}
		seen[first.public(name)] = true
	}
	if len(seen) != len(kinds()) {
		t.Errorf("%d different keys of %d", len(seen), len(kinds()))
	}
	if first.Public("nobody") != "" {
		t.Error("an unknown user has a key")
	}
	for what, ok := range map[string]bool{
		"issuer": nkeys.IsValidPublicAccountKey(first.public(keyIssuer)), "xkey": nkeys.IsValidPublicCurveKey(first.public(keyXKey)),
		"ops": nkeys.IsValidPublicUserKey(first.OpsPublic()), "ops-sys": nkeys.IsValidPublicUserKey(first.OpsSysPublic()),
		"seeds": len(first.OpsSeed()) > 50 && len(first.OpsSysSeed()) > 50,
	} {
		if !ok {
			t.Errorf("%s is not of its kind", what)
		}
	}
	left, err := filepath.Glob(filepath.Join(filepath.Dir(file), ".*"))
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestKeysMadeAtOnceAreTheSame(t *testing.T) {
	file := filepath.Join(t.TempDir(), "keys.json")
	const starters = 8
	public := make([]string, starters)
	var all sync.WaitGroup
	for i := range starters {
		all.Go(func() {
			k, err := LoadKeys(file)
			if err != nil {
				t.Error(err)
				return
			}
			public[i] = k.Public(UserSec)
		})
	}
	all.Wait()
	for _, p := range public {
		if p != public[0] {
			t.Fatalf("two installations in one file: %v", public)
		}
	}
}

func TestKeysAreRefused(t *testing.T) {
	good := filepath.Join(t.TempDir(), "keys.json")
	if _, err := LoadKeys(good); err != nil {
		t.Fatal(err)
	}
	body, err := os.ReadFile(good)
	if err != nil {
		t.Fatal(err)
	}
	edit := func(change func(f *keysFile)) []byte {
		var f keysFile
		if err := json.Unmarshal(body, &f); err != nil {
			t.Fatal(err)
		}
		change(&f)
		out, err := json.Marshal(f)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	for name, c := range map[string]struct {
		body []byte
		mode os.FileMode
		want string
	}{
		"group may read":   {body, 0o640, "open to others (mode 0640)"},
		"others may read":  {body, 0o604, "open to others (mode 0604)"},
		"group may write":  {body, 0o620, "open to others (mode 0620)"},
		"empty":            {nil, 0o600, "not valid JSON"},
		"cut":              {body[:len(body)/2], 0o600, "not valid JSON"},
		"more behind it":   {append(append([]byte{}, body...), body...), 0o600, "not valid JSON"},
		"another version":  {edit(func(f *keysFile) { f.Version = 2 }), 0o600, "version 2, want 1"},
		"a key is missing": {edit(func(f *keysFile) { delete(f.Seeds, "sec") }), 0o600, `the key "sec" is missing`},
		"a changed letter": {edit(func(f *keysFile) {
			s := []byte(f.Seeds["sec"])
			s[20] = map[bool]byte{true: 'B', false: 'A'}[s[20] == 'A']
			f.Seeds["sec"] = string(s)
		}), 0o600, `the key "sec" is not a seed`},
		"another kind":  {edit(func(f *keysFile) { f.Seeds["sec"] = f.Seeds[keyIssuer] }), 0o600, `the key "sec" is not a seed`},
		"a public key":  {edit(func(f *keysFile) { f.Seeds["xkey"] = "XABC" }), 0o600, `the key "xkey" is not a seed`},
		"a wrong type":  {[]byte(strings.Replace(string(body), `"version": 1`, `"version": "SUACSECRETSECRETSECRETSECRETSECRETSECRETSECRET"`, 1)), 0o600, "not valid JSON"},
		"a wrong value": {[]byte(`{"version":1,"seeds":"SUACSECRETSECRETSECRETSECRETSECRETSECRETSECRET"}`), 0o600, "not valid JSON"},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "keys.json")
			if err := os.WriteFile(file, c.body, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(file, c.mode); err != nil {
				t.Fatal(err)
			}
			_, err := LoadKeys(file)
			if !errors.Is(err, &schemas.Error{Code: schemas.CodeInvalid}) || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got %v, want CodeInvalid with %q", err, c.want)
			}
			if text := fmt.Sprintf("%v %+v %#v", err, err, err); seedForm.MatchString(text) {
				t.Errorf("a seed in the error: %s", text)
			}
			after, err := os.ReadFile(file)
			if err != nil || string(after) != string(c.body) {
				t.Errorf("the file was touched: %v", err)
			}
		})
	}
	t.Run("a link", func(t *testing.T) {
		link := filepath.Join(t.TempDir(), "keys.json")
		if err := os.Symlink(good, link); err != nil {
			t.Fatal(err)
		}
		if _, err := LoadKeys(link); err == nil || !strings.Contains(err.Error(), "not a regular file") {
			t.Errorf("got %v", err)
		}
	})
	t.Run("a folder that is a file", func(t *testing.T) {
		if _, err := LoadKeys(filepath.Join(good, "keys.json")); err == nil {
			t.Error("no error")
		}
	})
}

func TestKeysShowNothing(t *testing.T) {
	k := loadKeys(t)
	for _, verb := range []string{"%v", "%+v", "%#v", "%s"} {
		if text := fmt.Sprintf(verb, k); text != "embedded.Keys" {
			t.Errorf("%s shows %s", verb, text)
		}
	}
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "keys", k)
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "keys", k)
	if seedForm.MatchString(log.String()) || strings.Count(log.String(), "keys") != 2 {
		t.Errorf("the log shows %s", log.String())
	}
}

// FuzzParseKeys: whatever the file holds, parsing neither panics nor shows a seed, and what it accepts is complete.
func FuzzParseKeys(f *testing.F) {
	file := filepath.Join(f.TempDir(), "keys.json")
	if _, err := LoadKeys(file); err != nil {
		f.Fatal(err)
	}
	body, err := os.ReadFile(file)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(body)
	f.Add([]byte(`{"version":1,"seeds":{}}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, body []byte) {
		k, err := parseKeys("keys.json", body)
		if err != nil {
			if seedForm.MatchString(err.Error()) {
				t.Errorf("a seed in the error: %v", err)
			}
			return
		}
		for name := range kinds() {
			if k.public(name) == "" {
				t.Errorf("accepted without %s", name)
			}
		}
	})
}
