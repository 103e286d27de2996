package source

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/org-runink/runbus/schemas"
)

func TestRedact(t *testing.T) {
	const secret = `p@ss/w"ö\rd 7`
	secrets := map[string]string{"password": secret}
	quoted, _ := json.Marshal(secret)
	for _, form := range []string{
		secret, strings.ReplaceAll(strings.ToUpper(secret), "Ö", "ö"), url.QueryEscape(secret), strings.ToLower(url.QueryEscape(secret)), url.PathEscape(secret), strconv.Quote(secret), string(quoted),
		base64.StdEncoding.EncodeToString([]byte(secret)), base64.RawURLEncoding.EncodeToString([]byte(secret)), hex.EncodeToString([]byte(secret)),
		"Basic " + base64.StdEncoding.EncodeToString([]byte("ada:"+secret)), "Basic " + base64.URLEncoding.EncodeToString([]byte("a:"+secret+"x")),
		"postgres://ada:" + url.PathEscape(secret) + "@db/x", (&url.URL{Scheme: "http", Host: "h", User: url.UserPassword("ada", secret)}).String(),
	} {
		err := Redact(fmt.Errorf("FATAL: login with <%s> failed for user ada", form), secrets)
		for _, shown := range []string{form, strings.TrimPrefix(form, "Basic ")} {
			if strings.Contains(err.Error(), shown) {
				t.Errorf("%s: %s", form, err)
			}
		}
		if !strings.HasPrefix(err.Error(), "FATAL: login with <") || !strings.HasSuffix(err.Error(), "> failed for user ada") {
			t.Errorf("the source's own words are gone: %s", err)
		}
	}
}

func TestRedactKnowsParts(t *testing.T) {
	for _, c := range []struct{ secret, text, want string }{
		{"e", "the user e failed here", "the user *** failed here"},
		{"abc", "abc abcd x-abc:", "*** abcd x-***:"},
		{"", "all of it", "all of it"},
		{"ada:hunter2", "no hunter2 here", "no *** here"},
		{"postgres://ada:hunter2@db/x?sslmode=require&key=0123456789", "hunter2 0123456789 require", "*** *** require"},
		{"-----BEGIN KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQEF\n-----END KEY-----", "bad line kqhkiG9w0BAQEF", "bad line ***"},
		{"correct horse battery staple", "near \"correct horse batt\"", "near \"***\""},
		{"unrelated", "dial https://ada:other@host/x failed", "dial https://ada:***@host/x failed"},
		{"unrelated", "password authentication failed for user \"ada\"", "password authentication failed for user \"ada\""},
		{"secret", "bad \xff secret", "bad \ufffd ***"},
		{"se\xffcret", "bad se\xffcret", "bad ***"},
	} {
		if got := Redact(errors.New(c.text), map[string]string{"s": c.secret}).Error(); got != c.want {
			t.Errorf("%q in %q: %q, want %q", c.secret, c.text, got, c.want)
		}
	}
}

func TestRedactKeepsWhatItMay(t *testing.T) {
	if Redact(nil, nil) != nil {
		t.Error("nil")
	}
	secrets := map[string]string{"p": "hunter2"}
	err := Redact(fmt.Errorf("query: %w", fmt.Errorf("hunter2: %w", context.Canceled)), secrets)
	if schemas.CodeOf(err) != schemas.CodeSource || !errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
	err = Redact(fmt.Errorf("connect: %w", schemas.Errorf(schemas.CodeForbiddenHop, "no hunter2").WithHint("not hunter2")), secrets)
	var e *schemas.Error
	if !errors.As(err, &e) || e.Code != schemas.CodeForbiddenHop || e.Message != "no ***" || e.Hint != "not ***" {
		t.Errorf("%#v", e)
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s"} { // nor by way of the cause
		if s := fmt.Sprintf(verb, Redact(fmt.Errorf("hunter2: %w", errors.New("hunter2")), secrets)); strings.Contains(s, "hunter2") {
			t.Errorf("%s: %s", verb, s)
		}
	}
}

func FuzzRedact(f *testing.F) {
	f.Add("hunter2", "no ", " here")
	f.Add("a:b@c/d?e=f", "http://x:", "@y")
	f.Add("ü\\\"", "", "")
	f.Fuzz(func(t *testing.T, secret, before, after string) {
		if len(secret) < wordSecret || strings.Contains(secret, "*") {
			return
		}
		for _, form := range []string{secret, url.QueryEscape(secret), base64.StdEncoding.EncodeToString([]byte(secret))} {
			got := Redact(errors.New(before+form+after), map[string]string{"s": secret}).Error()
			if strings.Contains(got, secret) {
				t.Errorf("%q in %q", secret, got)
			}
			if !utf8.ValidString(got) {
				t.Errorf("%q is not UTF-8", got)
			}
		}
	})
}
