package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

// What people get wrong: each is told what, with what to do, and with the status that scripts look at.
func TestMistakes(t *testing.T) {
	bin := binaries(t)
	session := schemas.NewSessionToken()
	const canary = "hunter2"
	offline := map[string]string{"RUNINK_URL": "http://127.0.0.1:1", "RUNINK_TOKEN": session}
	for _, c := range []struct {
		args   string
		env    map[string]string
		status int
		text   string
	}{
		{"bogus", nil, 2, `no such command: "bogus"`},
		{"runner bogus", nil, 2, `see runink runner --help`},
		{"--bogus", nil, 2, "runink has no flag --bogus"},
		{"fetch run --bogus", nil, 2, "runink fetch run has no flag --bogus"},
		{"key create edge --json", nil, 2, "runink key create --json edge"},
		{"key create edge --ttl 1", nil, 2, "runink key create has no flag --ttl"},
		{"key create edge --json --ttl=1", nil, 2, "runink key create has no flag --ttl"},
		{"fetch list --outcome bogus", offline, 2, "--outcome bogus"},
		{"key create", nil, 2, "takes one argument, NAME, and got 0"},
		{"key create a b", nil, 2, "got 2"},
		{"runner list x", nil, 2, "takes no arguments"},
		{"runner list", nil, 2, "runink up"},
		{"runner list --context nope", nil, 2, `no context is named "nope"`},
		{"--context nope runner list", nil, 2, `no context is named "nope"`},
		{"runner list --context nope", offline, 2, "drop one of them"},
		{"runner list", offline, 1, "can't be reached"},
		{"runner list", map[string]string{"RUNINK_URL": "http://127.0.0.1:1"}, 2, "RUNINK_TOKEN is not"},
		{"runner list", map[string]string{"RUNINK_URL": "http://192.0.2.1:1", "RUNINK_TOKEN": session}, 2, "use https"},
		{"runner list", map[string]string{"RUNINK_URL": "https://127.0.0.1:1", "RUNINK_TOKEN": session, "RUNINK_CA": "/none"}, 2, "CA file"},
		{"user create bob", nil, 2, "--role"},
		{"user create --role boss bob", nil, 2, "READER, WRITER or ORG_ADMIN"},
		{"runner create", nil, 2, "takes one argument, NAME, and got 0"},
		{"runner create warehouse", nil, 2, "--address is missing"},
		{"runner create --address h:1 --label x warehouse", nil, 2, "KEY=VALUE"},
		{"runner create --address h:1 --label a=1 --label a=2 warehouse", nil, 2, "given twice"},
		{"runner create --address h:1 --wait --timeout 0s warehouse", nil, 2, "above zero"},
		{"runner edit warehouse", nil, 2, "nothing to change"},
		{"runner edit --no-labels --label a=b warehouse", nil, 2, "exclude each other"},
		{"runner token revoke", nil, 2, "TOKEN-ID"},
		{"runner token", nil, 2, "takes one argument, RUNNER"},
		{"audit list --limit 0", nil, 2, "1 to 1000"},
		{"audit list --limit x", nil, 2, "limit"},
		{"fetch run", nil, 2, "--source"},
		{"fetch run --source file --set path", nil, 2, "KEY=VALUE"},
		{"fetch run --source file --set a=1 --set a=2", nil, 2, "given twice"},
		{"fetch run --source file --max-rows -1", nil, 2, "negative"},
		{"fetch run --source file --format xml", offline, 2, "table, json, csv or arrow"},
		{"fetch run --source file --out /none/x", offline, 2, "--out"},
		{"runner show " + session, nil, 2, "a token or ticket among the arguments"},
		{"runner show crt1." + canary, nil, 2, "a token or ticket among the arguments"},
		{"runner crt1." + canary, nil, 2, "a token or ticket among the arguments"},
		{"crt1." + canary, nil, 2, "a token or ticket among the arguments"},
		{"runner list crt1." + canary, nil, 2, "a token or ticket among the arguments"},
		{"runner token revoke crt1." + canary, nil, 2, "a token or ticket among the arguments"},
		{"completion tcsh", nil, 2, "bash, zsh or fish"},
		{"up --files /none", nil, 2, "--files /none"},
		{"decode --type Nope", nil, 3, "not a message"},
	} {
		// The name of a test is in the paths of its folders, and so in the environment of what it starts.
		t.Run(strings.NewReplacer(session, "SESSION", canary, "SECRET").Replace(c.args), func(t *testing.T) {
			args := strings.Fields(c.args)
			plain := run(t, bin.Runink, c.env, args...)
			if plain.status != c.status || !strings.Contains(plain.stderr, c.text) || plain.stdout != "" {
				t.Errorf("status %d, %q, %q; want %d and %q", plain.status, plain.stdout, plain.stderr, c.status, c.text)
			}
			if strings.Contains(plain.stderr, session) || strings.Contains(plain.stderr, canary) {
				t.Error("the token is shown")
			}
			// The same with --json, wherever it may stand: as an object.
			asJSON := run(t, bin.Runink, c.env, append(args, "--json")...)
			if _, message, _ := asJSON.failure(t); asJSON.status == 0 || message == "" || asJSON.stdout != "" {
				t.Errorf("--json: status %d, %q, %q", asJSON.status, asJSON.stdout, asJSON.stderr)
			}
		})
	}
}

func TestContextFile(t *testing.T) {
	bin := binaries(t)
	home := t.TempDir()
	env := map[string]string{"HOME": home}
	token := filepath.Join(t.TempDir(), "token")
	session := schemas.NewSessionToken()
	if err := os.WriteFile(token, []byte(session+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := run(t, bin.Runink, env, "context", "add", "--url", "http://127.0.0.1:1", "--token-file", token, "far"); r.status != 0 {
		t.Fatal(r)
	}
	file := filepath.Join(home, ".config", "runink", "context.json")
	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("%v %v", info, err)
	}
	if r := run(t, bin.Runink, env, "nats", "context"); r.status != 2 || !strings.Contains(r.stderr, "--data-dir") {
		t.Errorf("ops' credentials without a data folder: %+v", r)
	}
	list := run(t, bin.Runink, env, "context", "list", "--json")
	var rows []struct{ Name, URL string }
	if err := json.Unmarshal([]byte(list.stdout), &rows); err != nil || len(rows) != 1 || rows[0].Name != "far" || strings.Contains(list.stdout, session) {
		t.Errorf("%s %v", list.stdout, err)
	}
	if r := run(t, bin.Runink, env, "runner", "list"); r.status != 1 || !strings.Contains(r.stderr, "can't be reached") {
		t.Error(r)
	}
	for _, args := range [][]string{{"add", "--url", "http://127.0.0.1:1", "--token-file", token, "near"}, {"use", "near"}, {"remove", "near"}} {
		if r := run(t, bin.Runink, env, append([]string{"context"}, args...)...); r.status != 0 {
			t.Fatal(r)
		}
	}
	if r := run(t, bin.Runink, env, "runner", "list"); r.status != 2 || !strings.Contains(r.stderr, "runink context use far") {
		t.Error(r)
	}
	if err := os.Chmod(file, 0o640); err != nil {
		t.Fatal(err)
	}
	if r := run(t, bin.Runink, env, "runner", "list"); r.status != 2 || !strings.Contains(r.stderr, "chmod 600 "+file) {
		t.Error(r)
	}
	for _, damage := range []string{"", "[]", `{"contexts":{"far":{"token":` + "\"" + session} {
		if err := os.WriteFile(file, []byte(damage), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(file, 0o600); err != nil {
			t.Fatal(err)
		}
		r := run(t, bin.Runink, env, "runner", "list", "--json")
		if _, message, hint := r.failure(t); r.status != 2 || !strings.Contains(message, "damaged") || hint == "" || strings.Contains(r.stderr, session) {
			t.Errorf("%q: %+v", damage, r)
		}
	}
}

// The other two binaries refuse what they can't work with, and never repeat a token.
func TestRunnersMistakes(t *testing.T) {
	bin := binaries(t)
	token, _, err := schemas.NewServiceToken("acme")
	if err != nil {
		t.Fatal(err)
	}
	open := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(open, []byte(token), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(open, 0o644); err != nil {
		t.Fatal(err)
	}
	notAFolder := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(notAFolder, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	addr := map[string]string{"RUNNER_ENROLL_ADDR": "127.0.0.1:1"}
	with := func(kv ...string) map[string]string {
		env := map[string]string{"RUNNER_ENROLL_ADDR": "127.0.0.1:1", "RUNNER_ENROLL_TOKEN": token}
		for i := 0; i < len(kv); i += 2 {
			env[kv[i]] = kv[i+1]
		}
		return env
	}
	for name, c := range map[string]struct {
		path string
		env  map[string]string
		args []string
		text string
	}{
		"no address, no ticket":  {bin.CoreRunner, nil, []string{"serve", "--state-dir", filepath.Join(t.TempDir(), "state")}, "not enrolled and has no ticket"},
		"no token (E3)":          {bin.CoreRunner, addr, []string{"serve"}, schemas.ErrTokenMissing().Error()},
		"bad id":                 {bin.CoreRunner, with("RUNNER_ID", "a b"), []string{"serve"}, "RUNNER_ID"},
		"token as an argument":   {bin.CoreRunner, addr, []string{"serve", token}, "a token on the command line is refused"},
		"token as a flag":        {bin.CoreRunner, addr, []string{"serve", "--token=" + token}, "a token on the command line is refused"},
		"token as a command":     {bin.CoreRunner, addr, []string{token}, "a token on the command line is refused"},
		"an argument":            {bin.CoreRunner, addr, []string{"serve", "x"}, "takes no arguments"},
		"unwritable state":       {bin.CoreRunner, with(), []string{"serve", "--state-dir", filepath.Join(notAFolder, "x")}, "--state-dir"},
		"token in an open file":  {bin.CoreRunner, map[string]string{"RUNNER_ENROLL_ADDR": "127.0.0.1:1", "RUNNER_ENROLL_TOKEN_FILE": open}, []string{"serve"}, "chmod 600"},
		"token in no file":       {bin.CoreRunner, map[string]string{"RUNNER_ENROLL_ADDR": "127.0.0.1:1", "RUNNER_ENROLL_TOKEN_FILE": "/dev/null"}, []string{"serve"}, "not a regular file"},
		"token twice":            {bin.CoreRunner, with("RUNNER_ENROLL_TOKEN_FILE", open), []string{"serve"}, "drop one of them"},
		"log level":              {bin.CoreRunner, with("LOG_LEVEL", "loud"), []string{"serve"}, "LOG_LEVEL"},
		"unknown role":           {bin.Face, map[string]string{"SERVICE_ROLE": "boss"}, nil, "control-plane or runner"},
		"face's runner (E3)":     {bin.Face, map[string]string{"SERVICE_ROLE": "runner", "RUNNER_ENROLL_ADDR": "127.0.0.1:1"}, nil, schemas.ErrTokenMissing().Error()},
		"face takes no argument": {bin.Face, nil, []string{token}, "takes no arguments"},
	} {
		t.Run(name, func(t *testing.T) {
			r := run(t, c.path, c.env, c.args...)
			if r.status != 2 || !strings.Contains(r.stderr, c.text) || strings.Contains(r.stderr+r.stdout, token) {
				t.Errorf("status %d, %q", r.status, r.stderr)
			}
		})
	}
	for _, path := range []string{bin.Face, bin.CoreRunner, bin.Runink} {
		for _, flag := range []string{"--help", "--version"} {
			if r := run(t, path, nil, flag); r.status != 0 || r.stdout == "" {
				t.Errorf("%s %s: %+v", filepath.Base(path), flag, r)
			}
		}
	}
}

// A control plane that `runink up` did not start: its operator has a context, and the nats CLI gets its credentials from the data folder.
func TestContextsOfFace(t *testing.T) {
	p := startUp(t, t.TempDir(), filepath.Join(t.TempDir(), "data"), "--no-runner")
	env := map[string]string{"HOME": t.TempDir()}
	for name, file := range map[string]string{"op": "operator.token", "admin": "local-admin.token"} {
		if r := run(t, p.bin.Runink, env, "context", "add", "--url", p.HTTP, "--token-file", filepath.Join(p.DataDir, file), name); r.status != 0 {
			t.Fatal(r)
		}
	}
	if r := run(t, p.bin.Runink, env, "--context", "op", "tenant", "create", "--save-context", "acme", "acme"); r.status != 0 {
		t.Error(r)
	}
	if r := run(t, p.bin.Runink, env, "--context", "acme", "runner", "list"); r.status != 0 {
		t.Error(r)
	}
	if r := run(t, p.bin.Runink, env, "--context", "admin", "tenant", "list"); r.status != 3 || !strings.Contains(r.stderr, "only the platform's operator") {
		t.Error(r)
	}
	dir := t.TempDir()
	if r := run(t, p.bin.Runink, env, "nats", "context", "--dir", dir, "--data-dir", p.DataDir, "--server", p.NATS); r.status != 0 {
		t.Fatal(r)
	}
	b, err := os.ReadFile(filepath.Join(dir, "runbus-ops.json"))
	if err != nil || !strings.Contains(string(b), p.NATS) || !strings.Contains(string(b), filepath.Join(p.DataDir, "ops.nk")) {
		t.Errorf("%s %v", b, err)
	}
}
