package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/schemas"
)

// client calls the HTTP API of one server.
type client struct {
	base  *url.URL
	token string
	http  *http.Client
}

func newClient(s endpoint) (*client, error) {
	base, err := url.Parse(s.URL)
	if err != nil || base.Host == "" || base.Scheme != "http" && base.Scheme != "https" {
		return nil, usagef("%q is not the URL of a control plane (https://host:port)", s.URL)
	}
	if host := base.Hostname(); base.Scheme == "http" && host != "localhost" && !net.ParseIP(host).IsLoopback() {
		return nil, usagef("%s is in the clear beyond this host, and would show the token: use https", s.URL)
	}
	if err := sessionToken(s.Token); err != nil {
		return nil, err
	}
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12},
		DialContext: (&net.Dialer{Timeout: 10 * time.Second}).DialContext, TLSHandshakeTimeout: 10 * time.Second,
		IdleConnTimeout: 90 * time.Second, // less than the server's: a fetch on a connection that it is closing ends without an answer
	}
	if s.CA != "" {
		pem, err := os.ReadFile(s.CA)
		if err != nil {
			return nil, usagef("the CA file can't be read: %v", err)
		}
		pool, err := x509.SystemCertPool()
		if err != nil {
			pool = x509.NewCertPool()
		}
		if !pool.AppendCertsFromPEM(pem) {
			return nil, usagef("%s holds no PEM certificate", s.CA)
		}
		transport.TLSClientConfig.RootCAs = pool
	}
	return &client{base: base, token: s.Token, http: &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, // never hand the token on
	}}, nil
}

// sessionToken refuses what is no token before it is sent anywhere: a runner's key must never cross the wire.
func sessionToken(token string) error {
	switch {
	case strings.HasPrefix(token, schemas.ServiceTokenPrefix):
		return usageHint("`runink user create` makes one", "this token is a runner's service-account key: the API takes a person's session token (%s…)", schemas.SessionTokenPrefix)
	case !schemas.IsSessionToken(token) || strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }):
		return usagef("this is not a session token (%s…)", schemas.SessionTokenPrefix)
	}
	return nil
}

// call sends body, if any, as JSON and reads the answer into out, if any.
func (c *client) call(ctx context.Context, method, path string, body, out any) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	resp, err := c.send(ctx, method, path, body, "application/json", "")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if out == nil {
		return nil
	}
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		return fmt.Errorf("read the answer of %s: %w", c.base.Host, err)
	}
	return nil
}

// page reads one page of a list, and the query of the next page, empty if there is none.
func (c *client) page(ctx context.Context, path string) (items []json.RawMessage, next url.Values, err error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	resp, err := c.send(ctx, http.MethodGet, path, nil, "application/json", "")
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&items); err != nil {
		return nil, nil, fmt.Errorf("read the answer of %s: %w", c.base.Host, err)
	}
	target, rel, _ := strings.Cut(resp.Header.Get("Link"), ">")
	if strings.Contains(rel, `rel="next"`) {
		if u, err := url.Parse(strings.TrimPrefix(target, "<")); err == nil {
			next = u.Query()
		}
	}
	return items, next, nil
}

// send returns the response of a call that succeeded; its body is the caller's to close. prefer is what the call asks for besides, if
// anything. What the server told has no Cause; an error with one came of the way there and back, as does one that is no schemas.Error.
func (c *client) send(ctx context.Context, method, path string, body any, accept, prefer string) (*http.Response, error) {
	var reader io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		reader = bytes.NewReader(b)
	}
	path, query, _ := strings.Cut(path, "?")
	target := c.base.JoinPath(path)
	target.RawQuery = query
	req, err := http.NewRequestWithContext(ctx, method, target.String(), reader)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	req.Header.Set("Accept", accept)
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if prefer != "" {
		req.Header.Set("Prefer", prefer)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.unreachable(ctx, err)
	}
	if resp.StatusCode < 300 {
		return resp, nil
	}
	defer resp.Body.Close()
	return nil, problem(resp)
}

func (c *client) unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var unknown x509.UnknownAuthorityError
	if errors.As(err, &unknown) {
		return schemas.Wrap(schemas.CodeFailed, err, "the certificate of "+c.base.Host+" is not trusted").WithHint("set RUNINK_CA, or `runink context add --ca`, to the PEM file of its CA")
	}
	var op *url.Error
	if errors.As(err, &op) {
		err = op.Err
	}
	hint := "is it running? `runink up` starts a local one"
	switch text := err.Error(); {
	case strings.Contains(text, "HTTP response to HTTPS client"):
		hint = "it serves plain HTTP: make it http:// (`runink context add`, RUNINK_URL)"
	case strings.Contains(text, "malformed HTTP"): // the bus says INFO
		return schemas.Wrap(schemas.CodeFailed, errNoAnswer, "what listens at "+c.base.Host+" speaks no HTTP").
			WithHint("that may be the port of the bus; the API has one of its own (RUNBUS_HTTP)")
	}
	return schemas.Wrap(schemas.CodeFailed, err, "the control plane at "+c.base.Host+" can't be reached").WithHint(hint)
}

// errNoAnswer is an answer that no control plane gives.
var errNoAnswer = errors.New("that is no answer of a control plane")

// problem turns an answer that is not a success into its error.
func problem(resp *http.Response) error {
	b, readErr := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if resp.StatusCode == http.StatusUnauthorized {
		return schemas.Errorf(schemas.CodeUnauthorized, "the token is not valid here").
			WithHint("it may have expired or been replaced: ask an admin for a new one, or look at `runink context list`")
	}
	var p struct {
		Code   schemas.Code `json:"code"`
		Detail string       `json:"detail"`
		Hint   string       `json:"hint"`
		// Outcome is set for a fetch that ended before the first byte of its result.
		Outcome    string `json:"outcome"`
		DispatchID string `json:"dispatchId"`
		Errors     []struct {
			Message  string `json:"message"`
			Location string `json:"location"`
		} `json:"errors"`
	}
	if err := json.Unmarshal(b, &p); err != nil || p.Code == "" {
		hint := "is this the URL of a control plane?"
		if bytes.Contains(b, []byte("HTTP request to an HTTPS server")) {
			hint = "it serves HTTPS: make it https:// (`runink context add`, RUNINK_URL)"
		}
		return schemas.Wrap(schemas.CodeFailed, cmp.Or(readErr, errNoAnswer), "the server answered "+resp.Status).WithHint(hint)
	}
	texts := []string{p.Detail}
	for _, e := range p.Errors {
		texts = append(texts, strings.TrimRight(e.Location+": "+e.Message, ": "))
	}
	text := strings.Join(texts, "; ")
	return process.WithDispatch(outcomeError(p.Outcome, (&schemas.Error{Code: p.Code, Message: text}).WithHint(p.Hint)), p.DispatchID)
}
