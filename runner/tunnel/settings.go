// Package tunnel dials a control plane as the runner's network wants it: directly, or with CONNECT through an HTTP proxy
// (SPEC E10). Sources never dial through it.
package tunnel

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"

	"golang.org/x/net/http/httpproxy"
)

// Settings are what an environment says about proxies. The zero value means none.
type Settings struct {
	// Proxy is an http:// or https:// URL or host:port. It may hold a user and a password: it is never shown.
	Proxy string
	// Except lists what is dialled directly, as NO_PROXY does: names with their subdomains, addresses, CIDRs, each with a port
	// or without; `*` is all. localhost and loopback addresses are always dialled directly.
	Except string
	// ProxyFrom and ExceptFrom are the variables that they came from, for texts.
	ProxyFrom, ExceptFrom string
}

// FromEnv reads https_proxy or HTTPS_PROXY, and no_proxy or NO_PROXY; of two that are set, the one in small letters.
func FromEnv(getenv func(string) string) Settings {
	first := func(names ...string) (value, name string) {
		for _, n := range names {
			if v := getenv(n); v != "" {
				return v, n
			}
		}
		return "", ""
	}
	var s Settings
	s.Proxy, s.ProxyFrom = first("https_proxy", "HTTPS_PROXY")
	s.Except, s.ExceptFrom = first("no_proxy", "NO_PROXY")
	return s
}

// Dialer makes connections by Settings. It is safe for concurrent use.
type Dialer struct {
	settings Settings
	proxy    *url.URL // nil: none
	choose   func(*url.URL) (*url.URL, error)
	tls      *tls.Config // for an https proxy
	net      net.Dialer
}

// New checks s. Roots are trusted for an https proxy; nil means the system's. No error shows what is in Settings.Proxy.
func New(s Settings, roots *x509.CertPool) (*Dialer, error) {
	if s.ProxyFrom == "" {
		s.ProxyFrom = "HTTPS_PROXY"
	}
	if s.ExceptFrom == "" {
		s.ExceptFrom = "NO_PROXY"
	}
	d := &Dialer{settings: s, tls: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots}}
	if s.Proxy == "" {
		return d, nil
	}
	u, err := parseProxy(s.Proxy)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.ProxyFrom, err)
	}
	d.proxy = u
	d.choose = (&httpproxy.Config{HTTPSProxy: u.String(), NoProxy: s.Except}).ProxyFunc()
	return d, nil
}

// parseProxy reads a proxy's URL; without a scheme it is http.
func parseProxy(s string) (*url.URL, error) {
	if !strings.Contains(s, "://") {
		s = "http://" + s
	}
	u, err := url.Parse(s)
	if err != nil || u.Hostname() == "" || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
		return nil, errors.New("it is not http://[user:password@]host:port (special characters in a password as %XX)")
	}
	port := map[string]string{"http": "80", "https": "443"}[u.Scheme]
	if port == "" {
		return nil, fmt.Errorf("a proxy of the kind %q is not known: only http:// and https://", clip(u.Scheme))
	}
	if u.Port() == "" {
		u.Host = net.JoinHostPort(u.Hostname(), port)
	}
	return u, nil
}

// Route is how an address is dialled.
type Route struct {
	// Proxy is the proxy's URL without user and password; empty: directly.
	Proxy string `json:"proxy,omitempty"`
	// Host and Port are what is dialled first: the proxy, or the address itself.
	Host, Port string `json:"-"`
	// Why names the variable that decided.
	Why string `json:"why"`
}

// Route says how addr (host:port) is dialled.
func (d *Dialer) Route(addr string) Route {
	host, port, _ := net.SplitHostPort(addr)
	direct := Route{Host: host, Port: port}
	if d.proxy == nil {
		direct.Why = d.settings.ProxyFrom + " is not set"
		return direct
	}
	if d.proxyFor(addr) == nil {
		direct.Why = d.settings.ExceptFrom + " names it"
		if ip := net.ParseIP(host); host == "localhost" || ip.IsLoopback() {
			direct.Why = "loopback is always dialled directly"
		}
		return direct
	}
	return Route{
		Proxy: d.proxy.Scheme + "://" + d.proxy.Host, Host: d.proxy.Hostname(), Port: d.proxy.Port(),
		Why: "set by " + d.settings.ProxyFrom,
	}
}

func (d *Dialer) proxyFor(addr string) *url.URL {
	if d.choose == nil {
		return nil
	}
	u, err := d.choose(&url.URL{Scheme: "https", Host: addr})
	if err != nil { // only of HTTP_PROXY, which is not asked
		return d.proxy
	}
	return u
}

func clip(s string) string {
	if len(s) > 20 {
		return s[:20] + "…"
	}
	return s
}
