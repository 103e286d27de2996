package httpsource

import (
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/runner/source/tabular"
	"github.com/org-runink/runbus/schemas"
)

// config is one checked request.
type config struct {
	url         *url.URL
	format      tabular.Format
	options     tabular.Options
	header      http.Header // with the credential
	secrets     map[string]string
	paging      string
	nextPath    tabular.Path
	pageParam   string
	pageStart   int64
	cursorPath  tabular.Path
	cursorParam string
	maxPages    int64
	anonymous   bool // other origins may be followed, without header
	timeout     time.Duration
	maxBody     int64
}

// configure checks everything that can be wrong with a request.
func configure(req source.Request) (*config, error) {
	header, rest, err := headers(req.Settings)
	if err != nil {
		return nil, err
	}
	req.Settings = rest
	v, err := spec.Read(req)
	if err != nil {
		return nil, err
	}
	c := &config{
		format: tabular.Format(v.Text("format")), header: header, secrets: maps.Clone(v.Secrets()), paging: v.Text("paging"),
		pageParam: v.Text("pageParam"), pageStart: v.Int("pageStart"), cursorParam: v.Text("cursorParam"), maxPages: v.Int("maxPages"),
		anonymous: v.Text("crossOrigin") == "anonymous", timeout: v.Duration("timeout"), maxBody: v.Int("maxBodyBytes"),
	}
	if c.url, err = parseURL(v.Text("url")); err != nil {
		return nil, badSetting("url", err)
	}
	if c.options, err = tabular.ReadOptions(v, c.format); err != nil {
		return nil, err
	}
	if err := c.setPaging(v); err != nil {
		return nil, err
	}
	if err := c.setAuth(v); err != nil {
		return nil, err
	}
	if c.header.Get("Accept") == "" {
		c.header.Set("Accept", map[tabular.Format]string{
			tabular.JSON: "application/json, */*;q=0.1", tabular.JSONLines: "application/x-ndjson, application/jsonl, */*;q=0.1", tabular.CSV: "text/csv, */*;q=0.1",
		}[c.format])
	}
	if c.header.Get("User-Agent") == "" {
		c.header.Set("User-Agent", "runbus")
	}
	return c, nil
}

func badSetting(name string, err error) error {
	return schemas.Errorf(schemas.CodeBadSource, "setting %q of source %s %s", name, Kind, err.Error())
}

// headers takes the header.NAME settings out of all settings.
func headers(settings map[string]string) (http.Header, map[string]string, error) {
	header, rest := http.Header{}, make(map[string]string, len(settings))
	for key, value := range settings {
		name, ok := strings.CutPrefix(key, headerPrefix)
		if !ok {
			rest[key] = value
			continue
		}
		if err := checkHeaderName(name); err != nil {
			return nil, nil, badSetting(key, err)
		}
		if err := checkHeaderValue(value); err != nil {
			return nil, nil, badSetting(key, err)
		}
		switch canonical := http.CanonicalHeaderKey(name); canonical {
		case "Authorization", "Proxy-Authorization", "Cookie":
			return nil, nil, schemas.Errorf(schemas.CodeBadSource, "setting %q of source %s would be a credential in the open", key, Kind).
				WithHint("set auth, and give the credential as a secret")
		default:
			if header.Values(canonical) != nil {
				return nil, nil, badSetting(key, errors.New("is there twice"))
			}
			header.Set(canonical, value)
		}
	}
	return header, rest, nil
}

func (c *config) setPaging(v *source.Values) error {
	var err error
	if c.nextPath, err = tabular.ParsePath(v.Text("nextPath")); err != nil {
		return badSetting("nextPath", err)
	}
	if c.cursorPath, err = tabular.ParsePath(v.Text("cursorPath")); err != nil {
		return badSetting("cursorPath", err)
	}
	for name, of := range map[string]string{"nextPath": "link", "pageParam": "page", "pageStart": "page", "cursorPath": "cursor", "cursorParam": "cursor"} {
		if v.Text(name) != "" && c.paging != of {
			return schemas.Errorf(schemas.CodeBadSource, "setting %q of source %s is for paging=%s", name, Kind, of)
		}
	}
	if c.paging == "cursor" && len(c.cursorPath) == 0 {
		return schemas.Errorf(schemas.CodeBadSource, "source %s needs the setting \"cursorPath\" for paging=cursor", Kind)
	}
	if (len(c.nextPath) > 0 || len(c.cursorPath) > 0) && c.format != tabular.JSON {
		return schemas.Errorf(schemas.CodeBadSource, "a path in the body needs format=json")
	}
	for path, name := range map[string]string{c.nextPath.String(): "nextPath", c.cursorPath.String(): "cursorPath"} {
		if path != "$" && (path == c.options.Rows.String() || strings.HasPrefix(path, c.options.Rows.String()+".") && len(c.options.Rows) > 0) {
			return badSetting(name, fmt.Errorf("is inside of jsonPath %s: it must be beside the rows", c.options.Rows))
		}
	}
	if len(c.options.Rows) == 0 && (len(c.nextPath) > 0 || len(c.cursorPath) > 0) {
		return schemas.Errorf(schemas.CodeBadSource, "source %s needs the setting \"jsonPath\": the next page is told beside the rows", Kind)
	}
	if c.pageParam == "" {
		c.pageParam = "page"
	}
	if v.Text("pageStart") == "" {
		c.pageStart = 1
	}
	if c.cursorParam == "" {
		c.cursorParam = "cursor"
	}
	return nil
}

// setAuth puts the credential into the header. Secrets and settings of another mode are refused.
func (c *config) setAuth(v *source.Values) error {
	mode := v.Text("auth")
	for name, of := range map[string]string{"password": "basic", "token": "bearer", "value": "header"} {
		switch {
		case of == mode && v.Secret(name) == "" && name != "password":
			return schemas.Errorf(schemas.CodeBadSource, "source %s needs the secret %q for auth=%s", Kind, name, mode)
		case of != mode && v.Secret(name) != "":
			return schemas.Errorf(schemas.CodeBadSource, "the secret %q of source %s is for auth=%s", name, Kind, of).
				WithHint("set auth=" + of + ", or leave that secret away")
		}
	}
	if v.Text("username") != "" && mode != "basic" || v.Text("authHeader") != "" && mode != "header" {
		return schemas.Errorf(schemas.CodeBadSource, "settings \"username\" and \"authHeader\" of source %s are for auth=basic and auth=header", Kind)
	}
	switch mode {
	case "basic":
		if v.Text("username") == "" || strings.Contains(v.Text("username"), ":") {
			return schemas.Errorf(schemas.CodeBadSource, "source %s needs the setting \"username\", without a colon, for auth=basic", Kind)
		}
		c.header.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(v.Text("username")+":"+v.Secret("password"))))
	case "bearer":
		c.header.Set("Authorization", "Bearer "+v.Secret("token"))
	case "header":
		name := v.Text("authHeader")
		if name == "" {
			return schemas.Errorf(schemas.CodeBadSource, "source %s needs the setting \"authHeader\" for auth=header", Kind)
		}
		if c.header.Values(name) != nil {
			return schemas.Errorf(schemas.CodeBadSource, "the header %q is set twice", name)
		}
		c.header.Set(name, v.Secret("value"))
	}
	return nil
}

func checkURL(s string) error { _, err := parseURL(s); return err }

func checkPath(s string) error { _, err := tabular.ParsePath(s); return err }

// parseURL reads an absolute URL of http or https. The reasons never show the URL: it may have a credential in it.
func parseURL(s string) (*url.URL, error) {
	u, err := url.Parse(s)
	switch {
	case err != nil:
		return nil, errors.New("is not a URL")
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, errors.New("must begin with https:// or http://")
	case u.User != nil:
		return nil, errors.New("must not have a user or password in it: set auth, and give the credential as a secret")
	case u.Hostname() == "" || u.Opaque != "":
		return nil, errors.New("has no host")
	}
	u.Fragment, u.RawFragment = "", ""
	return u, nil
}

// checkHeaderName refuses what the connection itself sets.
func checkHeaderName(s string) error {
	if !isToken(s) {
		return errors.New("is not the name of a header")
	}
	switch http.CanonicalHeaderKey(s) {
	case "Host", "Content-Length", "Transfer-Encoding", "Connection", "Keep-Alive", "Upgrade", "Te", "Trailer", "Proxy-Connection", "Accept-Encoding", "Range":
		return errors.New("names a header that the connection sets itself")
	}
	return nil
}

func checkHeaderValue(s string) error {
	if !isFieldValue(s) {
		return errors.New("has a control character in it")
	}
	return nil
}

// isToken is RFC 9110's grammar of a field name.
func isToken(s string) bool {
	for i := range len(s) {
		c := s[i]
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && !strings.ContainsRune("!#$%&'*+-.^_`|~", rune(c)) {
			return false
		}
	}
	return s != ""
}

// isFieldValue refuses what would end a header line.
func isFieldValue(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < ' ' && c != '\t' || c == 0x7f {
			return false
		}
	}
	return true
}

// sameOrigin compares scheme, host and port.
func sameOrigin(a, b *url.URL) bool {
	return a.Scheme == b.Scheme && strings.EqualFold(a.Hostname(), b.Hostname()) && port(a) == port(b)
}

func port(u *url.URL) string {
	if p := u.Port(); p != "" {
		return p
	}
	if u.Scheme == "https" {
		return "443"
	}
	return "80"
}

// shown is a URL for a message: its query may have a credential in it.
func shown(u *url.URL) string {
	c := url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}
	s := c.String()
	if u.RawQuery != "" {
		s += "?…"
	}
	return s
}
