package policy

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var kinds = []string{"file", "http", "postgres", "sqlite"}

const example = `
version: 1
deny:
  - {name: no-hr, cidrs: [10.9.0.0/16]}
  - {name: private, paths: [/srv/reports/private]}
allow:
  - name: warehouse
    kinds: [postgres]
    hosts: [DB.internal., "*.warehouse.example"]
    cidrs: [10.0.0.0/8, "::ffff:192.168.0.0/112", fd00::/8]
    ports: [6000-6010, 5432, 5432]
    budget: {perFetch: 1MiB, perDay: 2GB}
  - {kinds: [sqlite, file], paths: [/srv/reports/]}
budget: {perDay: 1TiB}
journal: {query: full}
`

func parse(t *testing.T, text string) *Policy {
	t.Helper()
	p, err := Parse([]byte(text), kinds)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestParseGivesTheNormalForm(t *testing.T) {
	p := parse(t, example)
	got, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	want := `{"default":"deny","allow":[{"name":"warehouse","kinds":["postgres"],"hosts":["*.warehouse.example","db.internal"],` +
		`"cidrs":["10.0.0.0/8","192.168.0.0/16","fd00::/8"],"ports":["5432","6000-6010"],"budget":{"perFetch":1048576,"perDay":2000000000}},` +
		`{"kinds":["file","sqlite"],"paths":["/srv/reports"]}],"deny":[{"name":"no-hr","cidrs":["10.9.0.0/16"]},{"name":"private","paths":["/srv/reports/private"]}],` +
		`"budget":{"perDay":1099511627776},"journal":{"query":"full"}}`
	if string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	same := strings.ReplaceAll(strings.Replace(example, "5432, 5432", "5432", 1), "DB.internal.", "db.internal")
	if parse(t, same).Digest() != p.Digest() {
		t.Error("the same policy in other words has another digest")
	}
	if parse(t, strings.Replace(example, "5432, 5432", "5433", 1)).Digest() == p.Digest() {
		t.Error("another policy has the same digest")
	}
	for _, part := range []string{`deny   "no-hr" (line 4)`, `allow  "allow #2" (line 13)`, "6000-6010", "deny   everything else", p.Digest()} {
		if !strings.Contains(p.Text(), part) {
			t.Errorf("no %q in\n%s", part, p.Text())
		}
	}
}

func TestParseRefuses(t *testing.T) {
	rule := func(s string) string { return "version: 1\nallow:\n  - " + s + "\n" }
	for text, want := range map[string]string{
		"":                                             "line 1: the policy is empty",
		"# only a comment\n":                           "line 1: the policy is empty",
		"default: allow\n":                             "line 1: the policy has no version",
		"version: 2\n":                                 "line 1: version must be 1",
		"version: 1\nversion: 1\n":                     `line 2: field "version" of the policy stands on line 1 already`,
		"version: 1\nalow: []\n":                       `line 2: the policy has no field "alow": it has allow, budget`,
		"version: 1\ndefault: maybe\n":                 "line 2: default must be allow or deny",
		"version: 1\n---\nversion: 1\n":                "one YAML document",
		"version: 1\nallow: {a: b}\n":                  "line 2: allow must be a list of rules",
		"version: [\n":                                 "line ",
		"- version\n":                                  "must be a mapping",
		"version: 1\njournal: {query: x}":              "line 2: query must be digest or full",
		"version: 1\nbudget: {perDay: -1}":             `line 2: "-1" is not a size`,
		"version: 1\nbudget: {perDay: 99999999999TiB}": "is not a size",
		"version: 1\nbudget: {perDay: 0}":              "is not a size",
		"version: 1\nallow: &a\n  - {hosts: [x]}\n":    "line 2: anchors and aliases are not allowed",
		"version: 1\ndeny:\n  - {hosts: [x], budget: {perFetch: 1}}\n":            "line 3: rule deny #1 can't have a budget",
		"version: 1\ndeny:\n  - {name: a, hosts: [x]}\n  - {name: a, hosts: [y]}": `line 4: the name "a" is that of the rule on line 3`,
		rule("{name: only}"):                             "line 3: rule allow #1 has none of kinds, hosts",
		rule("text"):                                     "line 3: rule allow #1 must be a mapping",
		rule("{hosts: [x], paths: [/a]}"):                "make it two rules",
		rule("{hosts: [x], host: [y]}"):                  `has no field "host"`,
		rule("{hosts: [x]\n    , hosts: [y]}"):           `line 4: field "hosts" of rule allow #1 stands on line 3 already`,
		rule("{hosts: x}"):                               "hosts must be a list",
		rule("{hosts: []}"):                              "at least one entry",
		rule("{hosts: [[x]]}"):                           "must be a text",
		rule(`{hosts: ["*"]}`):                           "is not a name",
		rule(`{hosts: ["a.*.b"]}`):                       "is not a name",
		rule(`{hosts: ["https://a"]}`):                   "is not a name",
		rule(`{hosts: ["a:80"]}`):                        "is not a name",
		rule(`{hosts: ["bücher.example"]}`):              "punycode",
		rule("{cidrs: [10.0.0.1/8]}"):                    "did you mean 10.0.0.0/8?",
		rule("{cidrs: [10.0.0.0/33]}"):                   "is not an address or CIDR",
		rule(`{cidrs: ["fe80::1%eth0"]}`):                "is not an address or CIDR",
		rule("{ports: [0]}"):                             "is not a port",
		rule("{ports: [65536]}"):                         "is not a port",
		rule("{ports: [20-10]}"):                         "is not a port",
		rule("{paths: [srv]}"):                           "must be absolute",
		rule("{paths: [/srv/../etc]}"):                   "must be absolute",
		rule("{paths: [/srv/*]}"):                        "has a wildcard",
		rule("{kinds: [postgre]}"):                       "a kind must be file or http",
		rule(`{name: "a b", hosts: [x]}`):                "a name has 1-64",
		rule("{hosts: [x], budget: {perDay: 1}}"):        "it is counted by its name",
		rule("{name: n, hosts: [x], budget: {day: 1}}"):  `budget has no field "day"`,
		rule("{name: n, hosts: [x], <<: {ports: [80]}}"): `has no field "<<"`,
	} {
		_, err := Parse([]byte(text), kinds)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func TestParseTellsEveryFault(t *testing.T) {
	_, err := Parse([]byte("version: 1\nallow:\n  - {hosts: [x], ports: [0]}\n  - {kinds: [y]}\n"), kinds)
	if err == nil || strings.Count(err.Error(), "\n") != 1 || !strings.Contains(err.Error(), "line 3") || !strings.Contains(err.Error(), "line 4") {
		t.Errorf("%v", err)
	}
	if _, err := Parse([]byte("version: 1\nallow:\n"+strings.Repeat("  - {ports: [0]}\n", 30)), kinds); err == nil || !strings.Contains(err.Error(), "and 10 more") {
		t.Errorf("%v", err)
	}
}

func TestReadFileNamesTheFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "p.yaml")
	if err := os.WriteFile(file, []byte("version: 2\nx: 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := ReadFile(file, kinds)
	if err == nil || strings.Count(err.Error(), file+": line ") != 2 {
		t.Errorf("%v", err)
	}
	if _, err := ReadFile(filepath.Dir(file), kinds); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("%v", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(example))
	f.Add([]byte("version: 1\nallow: &a [*a]\n"))
	f.Add([]byte("version: 1\ndeny:\n- {hosts: [\"*.a\"], cidrs: [::/0], ports: [1-65535]}\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := Parse(text, kinds)
		if err != nil {
			if p != nil {
				t.Error("a policy beside an error")
			}
			return
		}
		again, err := Parse(text, kinds)
		if err != nil || again.Digest() != p.Digest() || p.Text() == "" {
			t.Errorf("not the same twice: %v", err)
		}
		for _, rules := range [][]Rule{p.Allow, p.Deny} {
			for i := range rules {
				r := &rules[i]
				if r.network() && r.files() || len(r.Kinds) == 0 && !r.network() && !r.files() {
					t.Errorf("a rule that matches nothing, or everything: %+v", r)
				}
			}
		}
	})
}
