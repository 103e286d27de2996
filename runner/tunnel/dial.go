package tunnel

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
)

// maxAnswer bounds a proxy's answer to CONNECT, in bytes.
const maxAnswer = 64 << 10

// Error is a connection that did not come about because of the proxy. It never shows the proxy's user or password.
type Error struct {
	Proxy   string // host:port
	Status  int    // of the answer to CONNECT; 0: there was none
	Message string
	Hint    string // what to do about it
	Cause   error  // may be nil
}

// Error is what happened, with its cause.
func (e *Error) Error() string {
	if e.Cause == nil {
		return e.Message
	}
	return e.Message + ": " + e.Cause.Error()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Cause }

// DialContext connects to addr (host:port): directly, or by a tunnel through the proxy, which then resolves the name. Until it
// returns, ctx bounds all of it. What goes wrong with the proxy is an *Error.
func (d *Dialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	proxy := d.proxyFor(addr)
	if proxy == nil {
		return d.net.DialContext(ctx, network, addr)
	}
	c, err := d.net.DialContext(ctx, network, proxy.Host)
	if err != nil {
		return nil, d.failed(proxy, "can't reach the proxy", err,
			fmt.Sprintf("check %s, or name the control plane in %s to dial it directly", d.settings.ProxyFrom, d.settings.ExceptFrom))
	}
	if proxy.Scheme == "https" {
		t := d.tls.Clone()
		t.ServerName = proxy.Hostname()
		secured := tls.Client(c, t)
		if err := secured.HandshakeContext(ctx); err != nil {
			_ = c.Close()
			return nil, d.failed(proxy, "no TLS with the proxy", err,
				"its CA must be in the system's roots or in RUNNER_ENROLL_CA; a proxy without TLS is http:// in "+d.settings.ProxyFrom)
		}
		c = secured
	}
	// No deadline of its own outlives this function.
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	tunnel, err := d.connect(c, proxy, addr)
	if !stop() {
		err = d.failed(proxy, "no answer from the proxy", context.Cause(ctx), fmt.Sprintf("is what %s names a proxy, and does it answer others?", d.settings.ProxyFrom))
	}
	if err != nil {
		_ = c.Close()
		return nil, err
	}
	return tunnel, nil
}

// connect asks the proxy for the tunnel.
func (d *Dialer) connect(c net.Conn, proxy *url.URL, addr string) (net.Conn, error) {
	req := &http.Request{
		Method: http.MethodConnect, URL: &url.URL{Opaque: addr}, Host: addr,
		Header: http.Header{"User-Agent": {"core-runner"}},
	}
	if proxy.User != nil {
		password, _ := proxy.User.Password()
		req.Header.Set("Proxy-Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(proxy.User.Username()+":"+password)))
	}
	if err := req.Write(c); err != nil {
		return nil, d.failed(proxy, "the proxy went away", err, "")
	}
	r := bufio.NewReader(&io.LimitedReader{R: c, N: maxAnswer})
	resp, err := http.ReadResponse(r, req) //nolint:bodyclose // a tunnel has no body, whatever its head says; closing would read the server's bytes
	if err != nil {
		return nil, d.failed(proxy, "the answer of the proxy is not HTTP", err,
			fmt.Sprintf("is what %s names an HTTP proxy? One with TLS is https:// there", d.settings.ProxyFrom))
	}
	if resp.StatusCode/100 != 2 {
		return nil, d.refused(proxy, addr, resp)
	}
	// The server may have spoken already: its bytes came with the answer.
	head, err := r.Peek(r.Buffered())
	if err != nil {
		return nil, fmt.Errorf("the proxy %s: %w", proxy.Host, err)
	}
	if len(head) > 0 {
		return &headed{Conn: c, head: slices.Clone(head)}, nil
	}
	return c, nil
}

// refused says what the proxy's answer means.
func (d *Dialer) refused(proxy *url.URL, addr string, resp *http.Response) error {
	e := &Error{Proxy: proxy.Host, Status: resp.StatusCode}
	code := fmt.Sprintf("%d %s", resp.StatusCode, http.StatusText(resp.StatusCode))
	from := d.settings.ProxyFrom
	switch schemes := authSchemes(resp.Header.Values("Proxy-Authenticate")); {
	case resp.StatusCode == http.StatusProxyAuthRequired && len(schemes) > 0 && !slices.Contains(schemes, "basic"):
		e.Message = fmt.Sprintf("the proxy %s wants a kind of login that the runner does not speak (%s): %s", proxy.Host, code, strings.Join(schemes, ", "))
		e.Hint = "it speaks Basic: have this host let through, or run a local proxy that logs in"
	case resp.StatusCode == http.StatusProxyAuthRequired && proxy.User != nil:
		e.Message = fmt.Sprintf("the proxy %s refuses the user and password in %s (%s)", proxy.Host, from, code)
		e.Hint = "check them; special characters in a password are written as %XX"
	case resp.StatusCode == http.StatusProxyAuthRequired:
		e.Message = fmt.Sprintf("the proxy %s asks for a user and password (%s)", proxy.Host, code)
		e.Hint = fmt.Sprintf("put them into %s: http://user:password@host:port", from)
	case resp.StatusCode == http.StatusBadGateway, resp.StatusCode == http.StatusServiceUnavailable, resp.StatusCode == http.StatusGatewayTimeout:
		e.Message = fmt.Sprintf("the proxy %s can't reach %s (%s)", proxy.Host, addr, code)
		e.Hint = "is the control plane up, and does its name resolve where the proxy is?"
	default:
		e.Message = fmt.Sprintf("the proxy %s refuses a tunnel to %s (%s)", proxy.Host, addr, code)
		e.Hint = "have it allow CONNECT to that address; many allow port 443 only: the control plane's WebSocket (wss://) can be there"
	}
	return e
}

// authSchemes are the first words of the challenges, in small letters, those that are a scheme's name.
func authSchemes(challenges []string) []string {
	var out []string
	for _, c := range challenges {
		scheme, _, _ := strings.Cut(strings.ToLower(strings.TrimSpace(c)), " ")
		if scheme != "" && len(scheme) <= 20 && strings.Trim(scheme, "abcdefghijklmnopqrstuvwxyz0123456789-") == "" {
			out = append(out, scheme)
		}
	}
	return out
}

func (d *Dialer) failed(proxy *url.URL, what string, cause error, hint string) error {
	return &Error{Proxy: proxy.Host, Message: fmt.Sprintf("%s %s (from %s)", what, proxy.Host, d.settings.ProxyFrom), Cause: cause, Hint: hint}
}

// headed is a connection whose first bytes have been read already.
type headed struct {
	net.Conn
	head []byte
}

// Read gives out those first.
func (h *headed) Read(p []byte) (int, error) {
	if len(h.head) > 0 {
		n := copy(p, h.head)
		h.head = h.head[n:]
		return n, nil
	}
	return h.Conn.Read(p)
}
