// Package httpsource reads HTTP APIs (SPEC F1): GET, one page or many, JSON, JSON lines or CSV.
//
// Settings: url (http or https, without userinfo); format json (default), jsonl or csv; for json, jsonPath is where the rows
// are (package tabular has its grammar, the settings of texts, and the rules for types). header.NAME=value adds a request
// header. auth is none (default), basic (setting username, secret password), bearer (secret token) or header (setting
// authHeader, secret value). timeout bounds one request and its body (default 60s).
//
// Paging: none (default); link follows the Link header's rel="next", or the URL at nextPath in the body; page counts pageParam
// (default page) up from pageStart (default 1) until a page has no rows; cursor sends the value at cursorPath as cursorParam
// (default cursor) until there is none. At most maxPages (default 10000) pages are read, with a notice when there are more. A
// page, link or cursor that comes again ends the fetch with an error.
//
// Origins: the credential and the headers go to the origin of url (scheme, host, port) only. A redirect (at most 5) or next
// link to another origin is refused; crossOrigin=anonymous follows it without credential and headers. Never followed: another
// scheme, and https to http. Every connection goes through env.Dial; no proxy, no cookies.
//
// 429 and 503 are tried again up to 4 times, after Retry-After or a growing pause, if the context leaves the time. The
// decompressed bodies of a fetch may have maxBodyBytes in all (default 4 GiB); more is an error.
package httpsource

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/runner/source/tabular"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Kind is the name of this source.
const Kind = "http"

const (
	maxRedirects   = 5
	maxRetries     = 4
	defaultPages   = "10000"
	maxPages       = 1_000_000
	defaultTimeout = "60s"
	maxBody        = 1 << 40
	defaultBody    = "4294967296"
	headerPrefix   = "header."
)

var spec = source.Spec{
	Kind: Kind,
	Settings: append([]source.Setting{
		{Name: "url", Required: true, Check: checkURL},
		{Name: "format", Default: "json", Check: source.OneOf("json", "jsonl", "csv")},
		{Name: "auth", Default: "none", Check: source.OneOf("none", "basic", "bearer", "header")},
		{Name: "username"},
		{Name: "authHeader", Check: checkHeaderName},
		{Name: "paging", Default: "none", Check: source.OneOf("none", "link", "page", "cursor")},
		{Name: "nextPath", Check: checkPath},
		{Name: "pageParam"},
		{Name: "pageStart", Check: source.IntBetween(0, 1<<31)},
		{Name: "cursorPath", Check: checkPath},
		{Name: "cursorParam"},
		{Name: "maxPages", Default: defaultPages, Check: source.IntBetween(1, maxPages)},
		{Name: "crossOrigin", Default: "refuse", Check: source.OneOf("refuse", "anonymous")},
		{Name: "timeout", Default: defaultTimeout, Check: source.DurationBetween(time.Second, time.Hour)},
		{Name: "maxBodyBytes", Default: defaultBody, Check: source.IntBetween(1, maxBody)},
	}, tabular.Settings...),
	Secrets: []source.Setting{
		{Name: "password", Check: checkHeaderValue},
		{Name: "token", Check: checkHeaderValue},
		{Name: "value", Check: checkHeaderValue},
	},
}

type connector struct {
	pause func(context.Context, time.Duration) error // between two tries; nil: sleep
}

// New returns the connector for HTTP APIs.
func New() source.Connector { return connector{} }

// Kind is `http`.
func (connector) Kind() string { return Kind }

// Fetch reads the pages.
func (h connector) Fetch(ctx context.Context, env source.Env, req source.Request, out *source.Output) error {
	c, err := configure(req)
	if err != nil {
		return err
	}
	if env.Dial == nil {
		return schemas.Errorf(schemas.CodeForbiddenHop, "this runner dials nowhere")
	}
	transport := &http.Transport{
		DialContext:            env.Dial,
		ForceAttemptHTTP2:      true,
		MaxIdleConns:           2,
		MaxResponseHeaderBytes: 1 << 20,
		TLSHandshakeTimeout:    15 * time.Second,
	}
	defer transport.CloseIdleConnections()
	p := &pages{config: c, client: &client{config: c, transport: transport, left: c.maxBody, pause: h.pause}, out: out, table: tabular.NewTable(c.options, out, env.Allocator())}
	defer p.table.Release()
	out.Phase(runbusv1.Phase_PHASE_CONNECTING, "connecting to "+c.url.Host)
	err = p.read(ctx)
	if err == nil {
		err = p.table.Finish()
	}
	switch {
	case err == nil, errors.Is(err, source.ErrLimit):
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case schemas.CodeOf(err) == schemas.CodeFailed:
		return err // what writing the result failed with; all else has a code
	}
	return source.Redact(err, c.secrets)
}
