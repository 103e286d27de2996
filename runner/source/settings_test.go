package source

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/schemas"
)

var testSpec = &Spec{
	Kind: "test",
	Settings: []Setting{
		{Name: "host", Required: true},
		{Name: "port", Default: "5432", Check: IsPort},
		{Name: "tls", Check: IsBool},
		{Name: "wait", Default: "10s", Check: DurationBetween(time.Second, time.Minute)},
		{Name: "mode", Default: "fast", Check: OneOf("fast", "slow")},
	},
	Secrets: []Setting{{Name: "password", Check: func(s string) error {
		if len(s) > 20 {
			return errors.New("is too long")
		}
		return nil
	}}},
	Query: QuerySQL,
}

func TestSpecReads(t *testing.T) {
	v, err := testSpec.Read(Request{Settings: map[string]string{"host": "db", "tls": "true", "mode": ""}, Secrets: map[string]string{"password": "x"}, Query: "SELECT 1"})
	if err != nil {
		t.Fatal(err)
	}
	if v.Text("host") != "db" || v.Int("port") != 5432 || !v.Bool("tls") || v.Duration("wait") != 10*time.Second || v.Text("mode") != "fast" || v.Secret("password") != "x" || v.Query() != "SELECT 1" {
		t.Errorf("%+v", v)
	}
	if v.Secrets()["password"] != "x" {
		t.Error("secrets")
	}
	for name, ask := range map[string]func(){
		"undeclared setting": func() { v.Text("nope") }, "undeclared secret": func() { v.Secret("host") }, "unchecked type": func() { v.Int("host") },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			ask()
		}()
	}
}

func TestSpecRefuses(t *testing.T) {
	ok := map[string]string{"host": "db"}
	with := func(name, value string) map[string]string { return map[string]string{"host": "db", name: value} }
	for want, req := range map[string]Request{
		`source test needs the setting "host"`:                                        {},
		`source test has no setting "colour"`:                                         {Settings: with("colour", "red")},
		`source test has no setting "Host"`:                                           {Settings: with("Host", "x")},
		`source test has no secret "passwd"`:                                          {Settings: ok, Secrets: map[string]string{"passwd": "hunter2"}},
		`setting "port" of source test must be a number from 1 to 65535`:              {Settings: with("port", "65536")},
		`setting "tls" of source test must be true or false`:                          {Settings: with("tls", "maybe")},
		`setting "wait" of source test must be a duration from 1s to 1m0s, as in 30s`: {Settings: with("wait", "10")},
		`setting "mode" of source test must be one of fast, slow`:                     {Settings: with("mode", "FAST")},
		`secret "password" of source test is too long`:                                {Settings: ok, Secrets: map[string]string{"password": "hunter2hunter2hunter2"}},
	} {
		req.Query = "SELECT 1"
		_, err := testSpec.Read(req)
		if schemas.CodeOf(err) != schemas.CodeBadSource || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if _, err := testSpec.Read(Request{Settings: ok, Query: "DROP TABLE t"}); schemas.CodeOf(err) != schemas.CodeReadOnly {
		t.Error(err)
	}
	none := &Spec{Kind: "none"}
	if _, err := none.Read(Request{Query: "x"}); schemas.CodeOf(err) != schemas.CodeBadSource {
		t.Error(err)
	}
	var e *schemas.Error
	if _, err := none.Read(Request{Settings: ok}); !errors.As(err, &e) || e.Hint != "it has no settings" {
		t.Errorf("%#v", e)
	}
	if _, err := testSpec.Read(Request{}); !errors.As(err, &e) || e.Hint != "its settings are host (required), port, tls, wait, mode" {
		t.Errorf("%#v", e)
	}
}

// FuzzSpecRead: any settings give values or a coded error that shows no secret; the accessors never panic on what passed.
func FuzzSpecRead(f *testing.F) {
	f.Add("port", "1", "password", "s3cret-value", "SELECT 1")
	f.Add("wait", "1h", "passwd", "s3cret-value", "SELECT 1;;")
	f.Add("tls", "\xff", "password", "", "")
	f.Fuzz(func(t *testing.T, setting, value, secretName, secret, query string) {
		v, err := testSpec.Read(Request{Settings: map[string]string{"host": "h", setting: value}, Secrets: map[string]string{secretName: secret}, Query: query})
		if err != nil {
			if code := schemas.CodeOf(err); code != schemas.CodeBadSource && code != schemas.CodeReadOnly {
				t.Errorf("%v has code %s", err, code)
			}
			if len(secret) > 8 && secret != secretName && !strings.Contains(query, secret) && !strings.Contains(setting, secret) && !strings.Contains(secretName, secret) &&
				strings.Contains(err.Error(), secret) && !strings.Contains(`setting "secret" of source test must be a number from`, secret) { //nolint:gocritic // a secret may be a part of the text itself
				t.Errorf("%v shows the secret", err)
			}
			return
		}
		if p := v.Int("port"); p < 1 || p > 65535 {
			t.Errorf("port %d", p)
		}
		v.Bool("tls")
		v.Duration("wait")
	})
}
