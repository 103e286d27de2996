package embedded

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"time"

	"github.com/org-runink/runbus/schemas"
)

// Lives of the certificates that EnsureCertificate makes.
const (
	authorityLife = 10 * 365 * 24 * time.Hour
	serverLife    = 365 * 24 * time.Hour
	renewBefore   = serverLife / 3
)

// EnsureCertificate makes the TLS material of a default stack in dir, or keeps what is there and good: a local certificate
// authority and a server certificate of it for localhost, 127.0.0.1, ::1 and hosts (names or IP addresses). It returns the
// PEM files of the server's certificate and key and of the authority, which clients are given.
//
// The server's certificate is made again under the same authority when less than a third of its year is left, when a host
// is missing in it, or when it doesn't match its key; clients notice nothing. The authority's key stays in dir for that,
// mode 0600 like the server's: who can read it can read the installation's other keys as well. An authority that is about
// to expire is replaced, and clients need the new file. Damaged files of the authority, or a key that is open to others,
// are refused with CodeInvalid. Not safe for two processes on one dir at once.
func EnsureCertificate(dir string, hosts []string) (certFile, keyFile, caFile string, err error) {
	return ensureCertificate(dir, hosts, time.Now())
}

func ensureCertificate(dir string, hosts []string, now time.Time) (certFile, keyFile, caFile string, err error) {
	certFile, keyFile, caFile = filepath.Join(dir, "server.pem"), filepath.Join(dir, "server.key"), filepath.Join(dir, "ca.pem")
	hosts = append([]string{"localhost", "127.0.0.1", "::1"}, hosts...)
	for _, h := range hosts[3:] {
		if net.ParseIP(h) == nil && !validHost(h) {
			return "", "", "", schemas.Errorf(schemas.CodeInvalid, "%q is neither a host name nor an IP address", h)
		}
	}
	ca, err := ensureAuthority(caFile, filepath.Join(dir, "ca.key"), now)
	if err != nil {
		return "", "", "", err
	}
	if current(certFile, keyFile, ca, hosts, now) {
		return certFile, keyFile, caFile, nil
	}
	cert, key, err := ca.issue(hosts, now)
	if err != nil {
		return "", "", "", err
	}
	// Key first: a crash in between leaves a pair that doesn't match, which is made again at the next start.
	if err := errors.Join(replacePrivate(keyFile, key), replacePrivate(certFile, cert)); err != nil {
		return "", "", "", fmt.Errorf("write the server's certificate: %w", err)
	}
	return certFile, keyFile, caFile, nil
}

// authority is a certificate authority with its key.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func ensureAuthority(certFile, keyFile string, now time.Time) (*authority, error) {
	certPEM, certErr := os.ReadFile(certFile)
	keyPEM, keyErr := os.ReadFile(keyFile)
	if errors.Is(certErr, fs.ErrNotExist) || errors.Is(keyErr, fs.ErrNotExist) {
		return makeAuthority(certFile, keyFile, now)
	}
	if err := errors.Join(certErr, keyErr); err != nil {
		return nil, fmt.Errorf("read the local certificate authority: %w", err)
	}
	info, err := os.Stat(keyFile)
	if err != nil {
		return nil, fmt.Errorf("read the local certificate authority: %w", err)
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return nil, schemas.Errorf(schemas.CodeInvalid, "the key file %s is open to others (mode %04o)", keyFile, mode).
			WithHint("make it private with `chmod 600`; if somebody else could read it, remove the folder's certificates to have new ones made")
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, schemas.Wrap(schemas.CodeInvalid, err, fmt.Sprintf("the local certificate authority in %s is damaged", filepath.Dir(certFile))).
			WithHint("restore it from a backup, or remove its files to have a new one made: clients then need the new ca.pem")
	}
	key, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	if !ok || !pair.Leaf.IsCA {
		return nil, schemas.Errorf(schemas.CodeInvalid, "the local certificate authority in %s is not one", filepath.Dir(certFile))
	}
	if pair.Leaf.NotAfter.Before(now.Add(serverLife)) {
		return makeAuthority(certFile, keyFile, now)
	}
	return &authority{cert: pair.Leaf, key: key}, nil
}

func makeAuthority(certFile, keyFile string, now time.Time) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make the key of the local certificate authority: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: serial(),
		Subject:      pkix.Name{CommonName: "Runbus local authority"},
		NotBefore:    now.Add(-time.Minute), NotAfter: now.Add(authorityLife),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("make the local certificate authority: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("make the local certificate authority: %w", err)
	}
	keyPEM, err := encodeKey(key)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(replacePrivate(keyFile, keyPEM), replacePrivate(certFile, encodeCertificate(der))); err != nil {
		return nil, fmt.Errorf("write the local certificate authority: %w", err)
	}
	return &authority{cert: cert, key: key}, nil
}

// issue makes a server certificate and its key, both PEM.
func (a *authority) issue(hosts []string, now time.Time) (certPEM, keyPEM []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("make the server's key: %w", err)
	}
	template := &x509.Certificate{
		SerialNumber: serial(),
		Subject:      pkix.Name{CommonName: "Runbus server"},
		NotBefore:    now.Add(-time.Minute), NotAfter: now.Add(serverLife),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, h)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return nil, nil, fmt.Errorf("sign the server's certificate: %w", err)
	}
	keyPEM, err = encodeKey(key)
	return encodeCertificate(der), keyPEM, err
}

// current reports whether the files hold a certificate of ca that is good for hosts for a while yet, and its private key.
func current(certFile, keyFile string, ca *authority, hosts []string, now time.Time) bool {
	info, err := os.Stat(keyFile)
	if err != nil || info.Mode().Perm()&0o077 != 0 {
		return false
	}
	pair, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		return false
	}
	roots := x509.NewCertPool()
	roots.AddCert(ca.cert)
	_, err = pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: now.Add(renewBefore)})
	return err == nil && !slices.ContainsFunc(hosts, func(h string) bool { return pair.Leaf.VerifyHostname(h) != nil })
}

func serial() *big.Int {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails, crypto/rand
	b[0] &= 0x7f
	return new(big.Int).SetBytes(b[:])
}

func encodeCertificate(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("encode a private key: %w", err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// hostName is an RFC 1123 name, without wildcards.
var hostName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*$`)

func validHost(name string) bool { return len(name) <= 253 && hostName.MatchString(name) }
