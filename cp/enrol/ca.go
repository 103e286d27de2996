// Package enrol makes runners out of hosts that can be dialled: the runner CA, the enrolment by ticket, the renewal of
// certificates, and the links to the runners (SPEC C1–C9).
package enrol

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/internal/durable"
	"github.com/org-runink/runbus/schemas"
)

const (
	fileCA    = "ca.pem"
	fileCAKey = "ca.key" // key and certificate: what ca.pem is made of, so that one write mints the CA

	caLife  = 10 * 365 * 24 * time.Hour
	ownLife = 24 * time.Hour // of the control plane's client certificate
	// backDate makes certificates valid where a clock is behind.
	backDate = link.MaxSkew
)

// CA is the runner CA (SPEC C1): a trust root of its own, for the runners that are dialled and the control plane that dials them. It is
// safe for concurrent use.
type CA struct {
	cert *x509.Certificate
	key  crypto.Signer
	now  func() time.Time

	mu  sync.Mutex
	own *tls.Certificate // the control plane's; in memory only
}

// EnsureCA reads the CA in dir, or mints it there once. The folder must be 0700 and its files 0600 or 0400, of this user. A CA that is
// damaged, expired or half there is an error of CodeInvalid that says what to do; it is never minted again by itself, since every
// runner and every ticket is bound to it. Not safe for two processes that mint in one folder at once: one gets the other's.
func EnsureCA(dir string, log *slog.Logger) (*CA, error) { return ensureCA(dir, log, time.Now) }

func ensureCA(dir string, log *slog.Logger, now func() time.Time) (*CA, error) {
	if err := checkCAFolder(dir); err != nil {
		return nil, err
	}
	certPEM, certErr := readCAFile(dir, fileCA)
	keyPEM, keyErr := readCAFile(dir, fileCAKey)
	switch {
	case errors.Is(certErr, fs.ErrNotExist) && errors.Is(keyErr, fs.ErrNotExist):
		if err := mintCA(dir, now()); err != nil {
			return nil, fmt.Errorf("mint the runner CA: %w", err)
		}
		log.Info("the runner CA was minted", "folder", dir)
		return ensureCA(dir, log, now)
	case errors.Is(keyErr, fs.ErrNotExist):
		return nil, badCA(dir, "its key is missing")
	case keyErr != nil:
		return nil, keyErr
	case errors.Is(certErr, fs.ErrNotExist):
		// The mint ends with ca.pem; its content is in ca.key too.
		var err error
		if certPEM, err = certificateOf(keyPEM); err != nil {
			return nil, badCA(dir, "its certificate is missing")
		}
		if err := durable.Replace(filepath.Join(dir, fileCA), certPEM, nil); err != nil {
			return nil, fmt.Errorf("write the runner CA's certificate: %w", err)
		}
	case certErr != nil:
		return nil, certErr
	}
	ca := &CA{now: now}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, badCA(dir, "its certificate and key don't belong together or can't be read")
	}
	signer, ok := pair.PrivateKey.(crypto.Signer)
	if !ok || !pair.Leaf.IsCA {
		return nil, badCA(dir, "its certificate is not an authority's")
	}
	if now().After(pair.Leaf.NotAfter) {
		return nil, badCA(dir, "its certificate expired at "+pair.Leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	ca.cert, ca.key = pair.Leaf, signer
	return ca, nil
}

func badCA(dir, why string) *schemas.Error {
	return schemas.Errorf(schemas.CodeInvalid, "the runner CA in %s can't be used: %s", dir, why).
		WithHint("restore the folder from a backup; without one empty it to have a new CA minted, then revoke all dialled runners and create them again: they trust this CA only")
}

func checkCAFolder(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return schemas.Errorf(schemas.CodeInvalid, "the folder of the runner CA can't be made: %w", err).WithHint("choose another one with CORE_RUNNER_CA_DIR")
	}
	info, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("the folder of the runner CA: %w", err)
	}
	if !info.IsDir() {
		return schemas.Errorf(schemas.CodeInvalid, "CORE_RUNNER_CA_DIR: %s is not a folder", dir)
	}
	if uid, others := durable.OthersUser(info); others {
		return schemas.Errorf(schemas.CodeInvalid, "the folder of the runner CA %s belongs to the user %d, and this process runs as %d", dir, uid, os.Geteuid()).
			WithHint("run the control plane as the folder's owner, or give the folder and its files to its user with chown")
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return schemas.Errorf(schemas.CodeInvalid, "the folder of the runner CA %s is open to others (mode %04o)", dir, mode).
			WithHint("chmod 700 it; if somebody else could read the key, empty the folder to have a new CA minted and create all dialled runners again")
	}
	return nil
}

func readCAFile(dir, name string) ([]byte, error) {
	file := filepath.Join(dir, name)
	info, err := os.Stat(file)
	if err != nil {
		return nil, fmt.Errorf("the runner CA: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, badCA(dir, name+" is not a regular file")
	}
	if uid, others := durable.OthersUser(info); others {
		return nil, schemas.Errorf(schemas.CodeInvalid, "the file %s of the runner CA belongs to the user %d, and this process runs as %d", file, uid, os.Geteuid()).
			WithHint("chown it to the user that runs the control plane")
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return nil, schemas.Errorf(schemas.CodeInvalid, "the file %s of the runner CA is open to others (mode %04o)", file, mode).
			WithHint("chmod 600 it; if somebody else could read the key, empty the folder to have a new CA minted and create all dialled runners again")
	}
	body, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("the runner CA: %w", err)
	}
	return body, nil
}

func mintCA(dir string, now time.Time) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: "Runbus runner CA"},
		NotBefore: now.Add(-backDate), NotAfter: now.Add(caLife),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		// It can vouch for no name outside of its trust domain, whoever gets hold of it.
		PermittedURIDomains: []string{schemas.TrustDomain}, PermittedDNSDomainsCritical: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	certPEM := encodeCertificate(der)
	keyPEM := append(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), certPEM...)
	if err := durable.Create(filepath.Join(dir, fileCAKey), keyPEM, nil); err != nil {
		if errors.Is(err, fs.ErrExist) {
			return nil // another process minted it
		}
		return err
	}
	return durable.Replace(filepath.Join(dir, fileCA), certPEM, nil)
}

func certificateOf(keyPEM []byte) ([]byte, error) {
	for block, rest := pem.Decode(keyPEM); block != nil; block, rest = pem.Decode(rest) {
		if block.Type == "CERTIFICATE" {
			return pem.EncodeToMemory(block), nil
		}
	}
	return nil, errors.New("no certificate beside the key")
}

// SetClock has certificates dated by another clock, before the CA is used.
func (ca *CA) SetClock(now func() time.Time) { ca.now = now }

// SHA256 is the hash of the CA's certificate, as it stands in tickets.
func (ca *CA) SHA256() [32]byte { return sha256.Sum256(ca.cert.Raw) }

// Pool holds the CA alone.
func (ca *CA) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(ca.cert)
	return pool
}

// ClientTLS is the control plane's side of a connection to a runner, with its own certificate, for these ALPNs. It verifies nothing:
// for link.ProtoLink set VerifyConnection; what stands behind link.ProtoEnrol is checked by Enroller.Exchange. Make one for each dial:
// the certificate in it is renewed now and then.
func (ca *CA) ClientTLS(protos ...string) (*tls.Config, error) {
	own, err := ca.certificate()
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: protos,
		Certificates:       []tls.Certificate{*own},
		InsecureSkipVerify: true, //nolint:gosec // a runner is known by its SPIFFE id and fingerprint, not by a name: see above
	}, nil
}

// certificate is the control plane's own, renewed when half of its life is over.
func (ca *CA) certificate() (*tls.Certificate, error) {
	ca.mu.Lock()
	defer ca.mu.Unlock()
	now := ca.now()
	if ca.own != nil && now.Before(ca.own.Leaf.NotAfter.Add(-ownLife/2)) && now.After(ca.own.Leaf.NotBefore) {
		return ca.own, nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make the control plane's key: %w", err)
	}
	leaf, err := ca.sign(key.Public(), schemas.ControlPlaneURI(), x509.ExtKeyUsageClientAuth, ownLife)
	if err != nil {
		return nil, err
	}
	ca.own = &tls.Certificate{Certificate: [][]byte{leaf.Raw, ca.cert.Raw}, PrivateKey: key, Leaf: leaf}
	return ca.own, nil
}

// SignLeaf issues a runner's server certificate (SPEC C5) for the key of a request: it names the runner's SPIFFE id and nothing else,
// whatever the request asks for, and lives for life. The key must be P-256 or Ed25519 and have signed the request, else CodeInvalid.
// It returns the certificate with the CA behind it, PEM, and what is to be pinned.
func (ca *CA) SignLeaf(csrDER []byte, runnerID string, life time.Duration) (chainPEM []byte, leaf roster.Leaf, err error) {
	key, err := requestKey(csrDER)
	if err != nil {
		return nil, roster.Leaf{}, err
	}
	if !schemas.IsDialledID(runnerID) {
		return nil, roster.Leaf{}, fmt.Errorf("sign for %q: not the id of a dialled runner", runnerID)
	}
	cert, err := ca.sign(key, schemas.RunnerURI(runnerID), x509.ExtKeyUsageServerAuth, life)
	if err != nil {
		return nil, roster.Leaf{}, err
	}
	return append(encodeCertificate(cert.Raw), encodeCertificate(ca.cert.Raw)...), roster.Leaf{
		Fingerprint: fingerprintOf(cert.Raw), PublicKey: cert.RawSubjectPublicKeyInfo, NotBefore: cert.NotBefore, NotAfter: cert.NotAfter,
	}, nil
}

func (ca *CA) sign(key crypto.PublicKey, name *url.URL, usage x509.ExtKeyUsage, life time.Duration) (*x509.Certificate, error) {
	now := ca.now()
	template := &x509.Certificate{
		SerialNumber: serial(), URIs: []*url.URL{name},
		NotBefore: now.Add(-backDate), NotAfter: now.Add(life),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{usage}, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, key, ca.key)
	if err != nil {
		return nil, fmt.Errorf("sign a certificate: %w", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("sign a certificate: %w", err)
	}
	return cert, nil
}

// requestKey is the key of a certificate request that is signed by it.
func requestKey(csrDER []byte) (crypto.PublicKey, error) {
	csr, err := x509.ParseCertificateRequest(csrDER)
	if err != nil {
		return nil, schemas.Errorf(schemas.CodeInvalid, "the certificate request can't be read")
	}
	switch key := csr.PublicKey.(type) {
	case ed25519.PublicKey:
	case *ecdsa.PublicKey:
		if key.Curve != elliptic.P256() {
			return nil, schemas.Errorf(schemas.CodeInvalid, "the key of the certificate request is on %s: P-256 or Ed25519 is needed", key.Curve.Params().Name)
		}
	default:
		return nil, schemas.Errorf(schemas.CodeInvalid, "the key of the certificate request is %s: P-256 or Ed25519 is needed", csr.PublicKeyAlgorithm)
	}
	if err := csr.CheckSignature(); err != nil {
		return nil, schemas.Errorf(schemas.CodeInvalid, "the certificate request is not signed by its key")
	}
	return csr.PublicKey, nil
}

// keySHA256 is how a request's key is named in the registry: hex SHA-256 of its SPKI.
func keySHA256(spki []byte) string { return fingerprintOf(spki) }

func fingerprintOf(der []byte) string {
	sum := sha256.Sum256(der)
	return hex.EncodeToString(sum[:])
}

func encodeCertificate(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// certificateFingerprint is that of the first certificate in a PEM chain, "" if there is none.
func certificateFingerprint(chainPEM []byte) string {
	block, _ := pem.Decode(bytes.TrimSpace(chainPEM))
	if block == nil {
		return ""
	}
	return fingerprintOf(block.Bytes)
}

func serial() *big.Int {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails, crypto/rand
	b[0] = b[0]&0x7f | 0x40
	return new(big.Int).SetBytes(b[:])
}
