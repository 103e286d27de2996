package httpsource

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/org-runink/runbus/schemas"
)

// excerpt is how much of an error's body is shown.
const excerpt = 512

// client does GET requests with the rules of the package: redirects, origins, retries, limits.
type client struct {
	config    *config
	transport *http.Transport
	left      int64 // bytes of body that the fetch may still read
	pause     func(context.Context, time.Duration) error
}

// answer is a response of status 200, and the URL that gave it.
type answer struct {
	url    *url.URL
	header http.Header
	body   io.Reader
	close  func()
}

// get reads u. 204 has an empty body. The caller calls close.
func (c *client) get(ctx context.Context, u *url.URL) (*answer, error) {
	for try := 0; ; try++ {
		a, wait, err := c.follow(ctx, u)
		if err == nil || wait < 0 || try == maxRetries {
			return a, err
		}
		if wait == 0 {
			wait = time.Second << try
		}
		if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= wait {
			return nil, err // no time left: the reason is of more use than a deadline
		}
		if err := c.sleep(ctx, wait); err != nil {
			return nil, err
		}
	}
}

func (c *client) sleep(ctx context.Context, d time.Duration) error {
	if c.pause != nil {
		return c.pause(ctx, d)
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// follow does one request and its redirects. wait is negative if it makes no sense to try again, else what Retry-After says,
// 0 if it says nothing.
func (c *client) follow(ctx context.Context, u *url.URL) (*answer, time.Duration, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, c.config.timeout, errTimeout)
	keep := false
	defer func() {
		if !keep {
			cancel()
		}
	}()
	for hops := 0; ; hops++ {
		res, err := c.once(ctx, u) //nolint:bodyclose // closed by drop, by refused, or by the answer's close
		if err != nil {
			return nil, -1, c.explain(ctx, u, err)
		}
		if next := res.Header.Get("Location"); res.StatusCode >= 300 && res.StatusCode < 400 && next != "" {
			drop(res)
			if hops == maxRedirects {
				return nil, -1, schemas.Errorf(schemas.CodeSource, "%s: more than %d redirects", shown(u), maxRedirects)
			}
			if u, err = c.next(u, next, "redirect"); err != nil {
				return nil, -1, err
			}
			continue
		}
		if res.StatusCode == http.StatusOK || res.StatusCode == http.StatusNoContent {
			keep = true
			body := &bounded{r: res.Body, left: &c.left, most: c.config.maxBody}
			return &answer{url: u, header: res.Header, body: &explained{c: c, ctx: ctx, u: u, r: body}, close: func() { _ = res.Body.Close(); cancel() }}, 0, nil
		}
		wait := time.Duration(-1)
		if res.StatusCode == http.StatusTooManyRequests || res.StatusCode == http.StatusServiceUnavailable {
			wait = retryAfter(res.Header.Get("Retry-After"), time.Now())
		}
		return nil, wait, c.refused(u, res)
	}
}

// once does one request. The credential and the configured headers go to the configured origin only.
func (c *client) once(ctx context.Context, u *url.URL) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	if sameOrigin(u, c.config.url) {
		req.Header = c.config.header.Clone()
	} else {
		req.Header.Set("User-Agent", c.config.header.Get("User-Agent"))
		req.Header.Set("Accept", c.config.header.Get("Accept"))
	}
	return c.transport.RoundTrip(req)
}

// next resolves a link of the server and decides whether it may be followed; what names the link.
func (c *client) next(from *url.URL, link, what string) (*url.URL, error) {
	ref, err := url.Parse(link)
	if err != nil {
		return nil, schemas.Errorf(schemas.CodeSource, "%s: its %s is not a URL", shown(from), what)
	}
	u, err := parseURL(from.ResolveReference(ref).String())
	if err != nil {
		return nil, schemas.Errorf(schemas.CodeSource, "%s: the URL of its %s %s", shown(from), what, err)
	}
	switch {
	case sameOrigin(u, c.config.url):
		// also back from another origin, where the credential was not sent
	case c.config.url.Scheme == "https" && u.Scheme == "http":
		return nil, schemas.Errorf(schemas.CodeSource, "%s: its %s to %s would leave https", shown(from), what, shown(u))
	case !c.config.anonymous:
		return nil, schemas.Errorf(schemas.CodeSource, "%s: its %s leads to another origin, %s", shown(from), what, shown(u)).
			WithHint("set url to that origin, or crossOrigin=anonymous to follow it without credential and headers")
	}
	return u, nil
}

// refused is the error for a status other than 200.
func (c *client) refused(u *url.URL, res *http.Response) error {
	defer drop(res)
	body, _ := io.ReadAll(io.LimitReader(res.Body, excerpt+1)) // what there is
	text := strings.Join(strings.Fields(strings.ToValidUTF8(string(body), "�")), " ")
	if len(body) > excerpt {
		text += " …"
	}
	if text != "" {
		text = ": " + text
	}
	err := schemas.Errorf(schemas.CodeSource, "%s answered %d %s%s", shown(u), res.StatusCode, http.StatusText(res.StatusCode), text)
	if res.StatusCode == http.StatusUnauthorized || res.StatusCode == http.StatusForbidden {
		err = err.WithHint("check auth and its secret")
	}
	return err
}

// drop ends a response that is of no more use; a small rest is read so that the connection can be used again.
func drop(res *http.Response) {
	_, _ = io.CopyN(io.Discard, res.Body, 16<<10) // best effort
	_ = res.Body.Close()
}

var errTimeout = errors.New("httpsource: request timeout")

// explain says what failed, without the query of the URL.
func (c *client) explain(ctx context.Context, u *url.URL, err error) error {
	if context.Cause(ctx) == errTimeout {
		return schemas.Errorf(schemas.CodeSource, "%s: no complete answer within %s", shown(u), c.config.timeout).WithHint("raise timeout")
	}
	if code := schemas.CodeOf(err); code != schemas.CodeFailed {
		return err // the dial hook's own
	}
	return schemas.Errorf(schemas.CodeSource, "%s: %w", shown(u), err)
}

// explained is a body whose errors say where they come from.
type explained struct {
	c   *client
	ctx context.Context //nolint:containedctx // an io.Reader has no other way to know why it failed
	u   *url.URL
	r   io.Reader
}

func (e *explained) Read(p []byte) (int, error) {
	n, err := e.r.Read(p)
	if err != nil && err != io.EOF {
		err = e.c.explain(e.ctx, e.u, err)
	}
	return n, err
}

// bounded counts the bytes of all bodies of a fetch.
type bounded struct {
	r    io.Reader
	left *int64
	most int64
}

func (b *bounded) Read(p []byte) (int, error) {
	if *b.left < 0 {
		return 0, schemas.Errorf(schemas.CodeSource, "the answers have more than maxBodyBytes=%d bytes", b.most)
	}
	if int64(len(p)) > *b.left+1 {
		p = p[:*b.left+1]
	}
	n, err := b.r.Read(p)
	*b.left -= int64(n)
	if *b.left < 0 {
		return n, schemas.Errorf(schemas.CodeSource, "the answers have more than maxBodyBytes=%d bytes", b.most)
	}
	return n, err
}

// retryAfter reads the header: seconds or a date. 0 if it says nothing. At most 10 minutes.
func retryAfter(s string, now time.Time) time.Duration {
	const most = 10 * time.Minute
	s = strings.TrimSpace(s)
	if n, err := strconv.ParseUint(s, 10, 31); err == nil {
		return min(time.Duration(n)*time.Second, most)
	}
	if t, err := http.ParseTime(s); err == nil && t.After(now) {
		return min(t.Sub(now), most)
	}
	return 0
}
