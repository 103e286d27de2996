package runner

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/org-runink/runbus/runner/tunnel"
)

// soonExpired is how long before its end a certificate is warned of.
const soonExpired = 14 * 24 * time.Hour

// dns resolves what is dialled first: the control plane, or the proxy, which then resolves the control plane's name itself.
func (d *doctor) dns(ctx context.Context, route tunnel.Route) finding {
	whose := ""
	if route.Proxy != "" {
		whose = " (the proxy; it resolves the control plane's name itself)"
	}
	if _, err := netip.ParseAddr(route.Host); err == nil {
		return good("%s is an address: no name to resolve%s", route.Host, whose)
	}
	ctx, cancel := d.step(ctx)
	defer cancel()
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", route.Host)
	if err != nil {
		todo := "is the name right, and does this host's resolver know it (/etc/resolv.conf, /etc/hosts)?"
		if route.Proxy == "" {
			todo += " Where names outside resolve at a proxy only, set HTTPS_PROXY"
		}
		return fail(route.Host+whose+" does not resolve: "+err.Error(), todo)
	}
	var four, six []string
	for _, ip := range found {
		if ip = ip.Unmap(); ip.Is4() {
			four = append(four, ip.String())
		} else {
			six = append(six, ip.String())
		}
	}
	list := func(addrs []string) string {
		if len(addrs) == 0 {
			return "none"
		}
		return strings.Join(addrs, ", ")
	}
	return good("%s%s: IPv4 %s; IPv6 %s", route.Host, whose, list(four), list(six))
}

// tcp connects to what is dialled first.
func (d *doctor) tcp(ctx context.Context, route tunnel.Route) finding {
	ctx, cancel := d.step(ctx)
	defer cancel()
	began := time.Now()
	c, err := new(net.Dialer).DialContext(ctx, "tcp", net.JoinHostPort(route.Host, route.Port))
	if err != nil {
		_, todo := explainLink(err)
		if route.Proxy != "" {
			todo = "is the proxy up, and is its address right? " + route.Why
		}
		return fail(err.Error(), todo)
	}
	defer c.Close()
	return good("connected to %s in %s", c.RemoteAddr(), time.Since(began).Round(100*time.Microsecond))
}

// proxy says whether one is used and why, and asks it for the tunnel.
func (d *doctor) proxy(ctx context.Context, route tunnel.Route, addr string) finding {
	if route.Proxy == "" {
		return good("not used: %s", route.Why)
	}
	ctx, cancel := d.step(ctx)
	defer cancel()
	c, err := d.dial(ctx, addr)
	if err != nil {
		text, todo := explainLink(err)
		return fail(text, todo)
	}
	_ = c.Close()
	return good("%s (%s) gives a tunnel to %s", route.Proxy, route.Why, addr)
}

// serverInfo is what a NATS server says first that matters here.
type serverInfo struct {
	TLSRequired  bool `json:"tls_required"`
	TLSAvailable bool `json:"tls_available"`
}

// readInfo reads the first line of a NATS server.
func readInfo(c net.Conn) (serverInfo, error) {
	const most = 64 << 10
	var line []byte
	// Not a byte more than the line may be read: the handshake follows.
	for one := make([]byte, 1); ; {
		if _, err := io.ReadFull(c, one); err != nil {
			return serverInfo{}, err
		}
		line = append(line, one[0])
		if one[0] == '\n' || len(line) == most {
			break
		}
	}
	text, ok := strings.CutPrefix(string(line), "INFO ")
	var info serverInfo
	if !ok || json.Unmarshal([]byte(text), &info) != nil {
		return serverInfo{}, errors.New("what listens there does not speak NATS")
	}
	return info, nil
}

// secured shakes hands as the runner does, and tells of the certificate even if it is not to be trusted.
func (d *doctor) secured(ctx context.Context, u *url.URL) finding {
	ctx, cancel := d.step(ctx)
	defer cancel()
	c, err := d.dial(ctx, u.Host)
	if err != nil {
		text, todo := explainLink(err)
		return fail(text, todo)
	}
	defer c.Close()
	info := serverInfo{TLSRequired: u.Scheme == "wss"}
	if !webSocket(u) {
		if info, err = readInfo(c); err != nil {
			return fail("no greeting of a NATS server: "+err.Error(), "is it the control plane's NATS port? Its WebSocket port is dialled as wss://, and an inspecting firewall may let only that pass")
		}
	}
	switch {
	case !d.cfg.TLS && info.TLSRequired:
		return fail("the control plane requires TLS, and RUNNER_ENROLL_TLS=false turns it off here", "remove that setting")
	case !d.cfg.TLS:
		return warn("off, by RUNNER_ENROLL_TLS=false: whoever is on the way reads results", "use TLS unless both ends are on one host")
	case !webSocket(u) && !info.TLSRequired && !info.TLSAvailable:
		return fail("the control plane offers no TLS at this address", "check the address; RUNNER_ENROLL_TLS=false would send in the clear and needs a control plane that allows it")
	}
	// Everything is verified below: a handshake that fails would not show whose certificate it is.
	shake := tls.Client(c, &tls.Config{MinVersion: tls.VersionTLS13, ServerName: u.Hostname(), InsecureSkipVerify: true}) //nolint:gosec // see above
	if err := shake.HandshakeContext(ctx); err != nil {
		text, todo := explainLink(err)
		if todo == "" {
			todo = "something in between may not let TLS 1.3 pass: have the control plane's address let through as it is"
		}
		return fail("no handshake: "+text, todo)
	}
	return d.certificate(shake.ConnectionState(), u.Hostname())
}

// certificate judges what the server showed.
func (d *doctor) certificate(s tls.ConnectionState, host string) finding {
	leaf, now := s.PeerCertificates[0], d.o.Now()
	between := x509.NewCertPool()
	for _, c := range s.PeerCertificates[1:] {
		between.AddCert(c)
	}
	var names []string
	names = append(names, leaf.DNSNames...)
	for _, ip := range leaf.IPAddresses {
		names = append(names, ip.String())
	}
	saw := fmt.Sprintf("%s, %q issued by %q for %s, valid until %s",
		tls.VersionName(s.Version), leaf.Subject, leaf.Issuer, strings.Join(names, ", "), leaf.NotAfter.UTC().Format(time.RFC3339))
	verify := func(roots *x509.CertPool) error {
		_, err := leaf.Verify(x509.VerifyOptions{Roots: roots, Intermediates: between, DNSName: host, CurrentTime: now})
		return err
	}
	given, givenNames := d.givenCA()
	if err := verify(d.roots); err != nil {
		return fail(saw+": "+err.Error(), d.untrusted(err, leaf, givenNames))
	}
	switch {
	case given != nil && verify(given) != nil:
		return warn(saw+fmt.Sprintf("; trusted by this host's system, and not issued by the CA in RUNNER_ENROLL_CA (%s)", givenNames),
			"something between that inspects TLS and whose CA is installed here looks like this: it can read and change what passes. If that is not wanted, have the control plane's address let through; if the control plane has another certificate now, unset RUNNER_ENROLL_CA")
	case leaf.NotAfter.Sub(now) < soonExpired:
		return warn(saw+fmt.Sprintf("; that is in %s", leaf.NotAfter.Sub(now).Round(time.Hour)), "have the control plane's certificate renewed")
	}
	return good("%s", saw)
}

// untrusted is what to do about a certificate that does not verify.
func (d *doctor) untrusted(err error, leaf *x509.Certificate, given string) string {
	var unknown x509.UnknownAuthorityError
	var name x509.HostnameError
	var invalid x509.CertificateInvalidError
	switch {
	case errors.As(err, &unknown) && given != "":
		return fmt.Sprintf("RUNNER_ENROLL_CA has %s: either it is not this control plane's CA, or something between (a proxy or firewall that inspects TLS) shows a certificate by %q: have the address let through, or, if it is to be inspected, add that CA to the file",
			given, leaf.Issuer)
	case errors.As(err, &unknown):
		return fmt.Sprintf("set RUNNER_ENROLL_CA to the PEM file of the control plane's CA (tls/ca.pem in its data folder); if it has a certificate of a public CA, something between shows one by %q", leaf.Issuer)
	case errors.As(err, &name):
		return "dial the control plane under a name that is in its certificate, or have this one added (RUNBUS_HOSTS)"
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return fmt.Sprintf("this host's clock says %s and the certificate begins %s: set the clock, or have the certificate renewed",
			d.o.Now().UTC().Format(time.RFC3339), leaf.NotBefore.UTC().Format(time.RFC3339))
	}
	return "have the control plane's certificate replaced"
}

// givenCA is the CA file alone, and the names in it; nil without one.
func (d *doctor) givenCA() (*x509.CertPool, string) {
	if d.cfg.CA == "" {
		return nil, ""
	}
	rest, err := os.ReadFile(d.cfg.CA)
	if err != nil {
		return nil, "" // it could be read a moment ago
	}
	pool := x509.NewCertPool()
	var names []string
	for {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			return pool, strings.Join(names, ", ")
		}
		if c, err := x509.ParseCertificate(block.Bytes); err == nil {
			pool.AddCert(c)
			names = append(names, fmt.Sprintf("%q", c.Subject))
		}
	}
}
