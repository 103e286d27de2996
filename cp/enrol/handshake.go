package enrol

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/cp/egress"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/schemas"
)

// HandshakeError is why a runner at the other end of a connection is not taken for the one that was dialled.
type HandshakeError struct {
	Reason string // for metrics and logs: one of the words below
	Text   string
}

// The reasons.
const (
	ReasonVersion     = "tls_version"
	ReasonProtocol    = "protocol"
	ReasonOtherCA     = "other_ca"
	ReasonNames       = "names"
	ReasonSPIFFE      = "wrong_spiffe_id"
	ReasonExpired     = "expired"
	ReasonNotYetValid = "not_yet_valid"
	ReasonUsage       = "usage"
	ReasonNotPinned   = "not_pinned"
	ReasonRefused     = "refused"
	ReasonForbidden   = "forbidden_address"
)

// Error is the text.
func (e *HandshakeError) Error() string { return e.Text }

func refuse(reason, format string, args ...any) *HandshakeError {
	return &HandshakeError{Reason: reason, Text: fmt.Sprintf(format, args...)}
}

// ruled is the hook of a net.Dialer that refuses what rules refuse. It sees what is connected to, after names are resolved, and before
// anything is sent.
func ruled(rules egress.Rules) func(context.Context, string, string, syscall.RawConn) error {
	return func(_ context.Context, _, address string, _ syscall.RawConn) error {
		to, err := netip.ParseAddrPort(address)
		if err != nil {
			return fmt.Errorf("dial %s: %w", address, err)
		}
		if rule := rules.Refuses(to); rule != "" {
			return refuse(ReasonForbidden, "the control plane dials no runner there: %s", rule)
		}
		return nil
	}
}

// verifyLeaf decides whether the peer is the runner that was dialled: TLS 1.3, a certificate of the runner CA that names the runner's
// SPIFFE id and nothing else, valid now, for a server, and one that the registry has pinned. It returns its fingerprint.
func verifyLeaf(cs tls.ConnectionState, ca *x509.Certificate, r roster.Runner, now time.Time) (fingerprint string, err error) {
	if cs.Version != tls.VersionTLS13 {
		return "", refuse(ReasonVersion, "the runner does not speak TLS 1.3")
	}
	if len(cs.PeerCertificates) == 0 {
		return "", refuse(ReasonProtocol, "the runner shows no certificate")
	}
	leaf := cs.PeerCertificates[0]
	// The CA itself signs leaves. Times and usage have reasons of their own, below.
	if err := leaf.CheckSignatureFrom(ca); err != nil || len(leaf.UnhandledCriticalExtensions) > 0 {
		return "", refuse(ReasonOtherCA, "the runner's certificate is not of this control plane's runner CA")
	}
	if n := len(leaf.URIs); n != 1 || len(leaf.DNSNames)+len(leaf.IPAddresses)+len(leaf.EmailAddresses) > 0 {
		return "", refuse(ReasonNames, "the runner's certificate must have one URI and no other name: it has %d URI names and %d others",
			n, len(leaf.DNSNames)+len(leaf.IPAddresses)+len(leaf.EmailAddresses))
	}
	if id, err := schemas.RunnerOfURI(leaf.URIs[0]); err != nil {
		return "", refuse(ReasonSPIFFE, "the certificate at this address is no runner's: its SPIFFE id is not %s", schemas.RunnerURI(r.ID))
	} else if id != r.ID {
		return "", refuse(ReasonSPIFFE, "another runner listens at this address: %s", id)
	}
	switch {
	case now.Before(leaf.NotBefore):
		return "", refuse(ReasonNotYetValid, "the runner's certificate is not valid before %s, and the clock here says %s", stamp(leaf.NotBefore), stamp(now))
	case now.After(leaf.NotAfter):
		return "", refuse(ReasonExpired, "the runner's certificate expired at %s", stamp(leaf.NotAfter))
	case !slices.Equal(leaf.ExtKeyUsage, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}) || len(leaf.UnknownExtKeyUsage) > 0 || leaf.KeyUsage&x509.KeyUsageDigitalSignature == 0:
		return "", refuse(ReasonUsage, "the runner's certificate is not one for a server")
	}
	fingerprint = fingerprintOf(leaf.Raw)
	if r.Pinned(fingerprint) == nil {
		return "", refuse(ReasonNotPinned, "the runner's certificate is not the one on record: it was replaced, or made for another host")
	}
	return fingerprint, nil
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// explainDial says what a failed dial or handshake means, in words that are safe to show to the runner's tenant.
func explainDial(err error, address string) error {
	var ours *HandshakeError
	var alert tls.AlertError
	var record tls.RecordHeaderError
	var dns *net.DNSError
	var op *net.OpError
	text := err.Error()
	switch {
	case errors.As(err, &ours):
		return ours
	case strings.Contains(text, "protocol version"):
		return refuse(ReasonVersion, "the runner does not speak TLS 1.3")
	case strings.Contains(text, "no application protocol"):
		return refuse(ReasonProtocol, "what listens at %s is no runner: it speaks neither %s nor %s", address, link.ProtoEnrol, link.ProtoLink)
	case errors.As(err, &record):
		return refuse(ReasonProtocol, "what listens at %s speaks no TLS", address)
	case errors.As(err, &alert), strings.Contains(text, "remote error: tls"):
		return refuse(ReasonRefused, "the runner refused the handshake (its log says why): %s", strings.TrimPrefix(text, "remote error: "))
	case errors.As(err, &dns):
		return fmt.Errorf("the name in %s does not resolve: %w", address, plainDNS(dns))
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("nothing listens at %s: %w", address, syscall.ECONNREFUSED)
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded), isTimeout(err):
		return fmt.Errorf("no answer from %s within the time: %w", address, os.ErrDeadlineExceeded)
	case errors.As(err, &op): // without the addresses of both ends
		return fmt.Errorf("%s can't be reached: %w", address, op.Err)
	}
	return err
}

// plainDNS says nothing of the resolvers of this network: tenants read it.
func plainDNS(err *net.DNSError) *net.DNSError {
	plain := &net.DNSError{Err: "the resolver failed", Name: err.Name, IsTimeout: err.IsTimeout, IsTemporary: err.IsTemporary, IsNotFound: err.IsNotFound}
	switch {
	case err.IsNotFound:
		plain.Err = "no such host"
	case err.IsTimeout:
		plain.Err = "the resolver does not answer"
	}
	return plain
}

func isTimeout(err error) bool {
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}
