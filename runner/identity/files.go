package identity

import (
	"bytes"
	"crypto"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/org-runink/runbus/internal/durable"
	"github.com/org-runink/runbus/schemas"
)

// maxFile is more than any file of the folder has.
const maxFile = 64 << 10

const otherFolder = "choose another folder with --state-dir (CORE_RUNNER_STATE_DIR)"

// takeFolder makes dir if it is missing, checks it and locks it. The lock is on the folder itself, so that it leaves no file.
func takeFolder(dir string) (*os.File, error) {
	dir = filepath.Clean(dir) // a slash at the end would follow a link
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, errNotMade(err)
	}
	f, err := openFolder(dir)
	if err != nil {
		return nil, err
	}
	if err := lockFolder(f); err != nil {
		_ = f.Close()
		return nil, err
	}
	if err := writable(dir); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func errNotMade(err error) *schemas.Error {
	return schemas.Errorf(schemas.CodeInvalid, "the state folder can't be made: %w", err).WithHint(otherFolder + ", or make it for this user")
}

// Makeable is the error of making dir, which is missing, found out by looking: nil if this process may make it.
func Makeable(dir string) error {
	const writeAndSearch = 2 | 1 // W_OK, X_OK
	missing := filepath.Clean(dir)
	for {
		parent := filepath.Dir(missing)
		info, err := os.Stat(parent)
		switch {
		case err != nil && parent != missing: // it is missing too, or can't be told from one that is
			missing = parent
			continue
		case err == nil && !info.IsDir():
			err = &os.PathError{Op: "mkdir", Path: parent, Err: syscall.ENOTDIR}
		case err == nil:
			if denied := syscall.Access(parent, writeAndSearch); denied != nil {
				err = &os.PathError{Op: "mkdir", Path: missing, Err: denied}
			}
		}
		if err != nil {
			return errNotMade(err)
		}
		return nil
	}
}

// openFolder opens dir, whose name is clean, and checks whose it is and who else may use it.
func openFolder(dir string) (*os.File, error) {
	f, err := os.OpenFile(dir, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		if info, lerr := os.Lstat(dir); lerr == nil && info.Mode()&os.ModeSymlink != 0 {
			return nil, schemas.Errorf(schemas.CodeInvalid, "the state folder %s is a symbolic link, which others could turn elsewhere", dir).
				WithHint("name the folder itself")
		}
		return nil, schemas.Errorf(schemas.CodeInvalid, "the state folder can't be opened: %w", err).WithHint(otherFolder)
	}
	if err := checkFolder(f); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func checkFolder(f *os.File) error {
	dir := f.Name()
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("state folder: %w", err)
	}
	if uid, others := durable.OthersUser(info); others {
		return schemas.Errorf(schemas.CodeInvalid, "the state folder %s belongs to the user %d, and this process runs as %d", dir, uid, os.Geteuid()).
			WithHint("run the runner as the folder's owner, or give the folder to its user with chown")
	}
	if mode := info.Mode().Perm(); mode != 0o700 {
		return schemas.Errorf(schemas.CodeInvalid, "the state folder %s has mode %04o and holds a private key: it must be 0700", dir, mode).
			WithHint("chmod 700 it; if somebody else could read it, revoke the runner and create it again")
	}
	return nil
}

func lockFolder(f *os.File) error {
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return schemas.Errorf(schemas.CodeConflict, "the state folder %s is in use by another runner", f.Name()).
				WithHint("stop that one, or give this one a folder of its own (--state-dir)")
		}
		return fmt.Errorf("lock the state folder: %w", err)
	}
	return nil
}

// writable finds out by writing; it leaves nothing.
func writable(dir string) error {
	probe, err := os.CreateTemp(dir, ".probe-*")
	if err != nil {
		return schemas.Errorf(schemas.CodeInvalid, "the state folder %s can't be written: %w", dir, cause(err)).
			WithHint("the certificate is renewed into it each day: mount it writable, and free space if the disk is full")
	}
	return errors.Join(probe.Close(), os.Remove(probe.Name()))
}

// cause is what is wrong without the path, which the message has already.
func cause(err error) error {
	var path *os.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}

// read reads one file of the folder: a regular one of this user that nobody else can read.
func (s *Store) read(name string) ([]byte, error) {
	body, err := readPrivate(filepath.Join(s.dir, name), "the file "+name+" of the state folder")
	if err != nil {
		return nil, err
	}
	return body, nil
}

// readPrivate reads a small file that must be regular, no link, this user's and of mode 0600 or 0400. what names it in errors.
func readPrivate(file, what string) ([]byte, error) {
	info, err := os.Lstat(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, cause(err))
	}
	if info.Mode()&os.ModeSymlink != 0 {
		return nil, schemas.Errorf(schemas.CodeInvalid, "%s is a symbolic link: name the file itself", what)
	}
	if !info.Mode().IsRegular() {
		return nil, schemas.Errorf(schemas.CodeInvalid, "%s is not a regular file", what)
	}
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0) // it may be another one by now
	if err != nil {
		return nil, schemas.Errorf(schemas.CodeInvalid, "%s can't be read: %w", what, cause(err))
	}
	defer f.Close()
	if info, err = f.Stat(); err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	if !info.Mode().IsRegular() {
		return nil, schemas.Errorf(schemas.CodeInvalid, "%s is not a regular file", what)
	}
	if uid, others := durable.OthersUser(info); others {
		return nil, schemas.Errorf(schemas.CodeInvalid, "%s belongs to the user %d, and this process runs as %d", what, uid, os.Geteuid()).
			WithHint("chown it to the user that runs the runner")
	}
	if mode := info.Mode().Perm(); mode != 0o600 && mode != 0o400 {
		return nil, schemas.Errorf(schemas.CodeInvalid, "%s has mode %04o and holds a secret: it must be 0600 or 0400", what, mode).
			WithHint("chmod 600 it; if somebody else could read it, what it held must be replaced")
	}
	body, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, cause(err))
	}
	if len(body) > maxFile {
		return nil, schemas.Errorf(schemas.CodeInvalid, "%s has over %d bytes", what, maxFile)
	}
	return body, nil
}

// who is the content of runner.json.
type who struct {
	ID, Name, Tenant string
	CASHA256         [32]byte
}

type whoFile struct {
	Version  int    `json:"version"`
	ID       string `json:"id"`
	Name     string `json:"name"`
	Tenant   string `json:"tenant,omitempty"` // once enrolled
	CASHA256 string `json:"caSha256"`
}

func (w who) encode() []byte {
	body, err := json.MarshalIndent(whoFile{Version: 1, ID: w.ID, Name: w.Name, Tenant: w.Tenant, CASHA256: hex.EncodeToString(w.CASHA256[:])}, "", "  ")
	if err != nil {
		panic(err) // strings alone
	}
	return append(body, '\n')
}

func parseWho(body []byte) (who, error) {
	var f whoFile
	d := json.NewDecoder(bytes.NewReader(body))
	if err := d.Decode(&f); err != nil {
		return who{}, errors.New("it is not valid JSON")
	}
	if f.Version != 1 {
		return who{}, fmt.Errorf("its version is %d, this program knows 1", f.Version)
	}
	w := who{ID: f.ID, Name: f.Name, Tenant: f.Tenant}
	sum, err := hex.DecodeString(f.CASHA256)
	if err != nil || len(sum) != len(w.CASHA256) {
		return who{}, errors.New("it has no SHA-256 of the CA")
	}
	copy(w.CASHA256[:], sum)
	if !schemas.IsDialledID(f.ID) {
		return who{}, errors.New("it has no id of a dialled runner")
	}
	if f.Tenant != "" && schemas.ValidTenant(f.Tenant) != nil {
		return who{}, errors.New("its tenant is no name of one")
	}
	return w, nil
}

func encodeRevoked(reason string, at time.Time) []byte {
	return fmt.Appendf(nil, "revoked at %s: %s\n", stamp(at), strings.Map(func(r rune) rune {
		if r < ' ' {
			return ' '
		}
		return r
	}, reason))
}

func revokedReason(body []byte) string {
	return strings.TrimSpace(strings.ToValidUTF8(string(body), "?"))
}

func parseCA(body []byte, want [32]byte) (*x509.Certificate, error) {
	block, rest := pem.Decode(body)
	if block == nil || block.Type != "CERTIFICATE" || len(bytes.TrimSpace(rest)) > 0 {
		return nil, errors.New("it is not one certificate in PEM")
	}
	if sha256.Sum256(block.Bytes) != want {
		return nil, errors.New("it is not the CA that the runner was enrolled with")
	}
	ca, err := x509.ParseCertificate(block.Bytes)
	if err != nil || !ca.IsCA {
		return nil, errors.New("it is not a certificate authority's")
	}
	return ca, nil
}

// parseIdentity reads identity.pem and checks it against the CA and the id.
func parseIdentity(body []byte, ca *x509.Certificate, id string) (*tls.Certificate, error) {
	pair, err := tls.X509KeyPair(body, body)
	if err != nil {
		return nil, errors.New("it is not a certificate with its private key in PEM")
	}
	key, ok := pair.PrivateKey.(crypto.Signer)
	if !ok {
		return nil, errors.New("its key can't sign")
	}
	if err := checkLeaf(pair.Leaf, key.Public(), ca, id); err != nil {
		return nil, err
	}
	pair.Certificate = [][]byte{pair.Leaf.Raw, ca.Raw}
	return &pair, nil
}

// assemble makes the content of identity.pem from a certificate that came, once it is checked.
func assemble(leaf *x509.Certificate, key crypto.Signer, ca *x509.Certificate, id string) ([]byte, *tls.Certificate, error) {
	if err := checkLeaf(leaf, key.Public(), ca, id); err != nil {
		return nil, nil, schemas.Errorf(schemas.CodeForbidden, "the certificate that came can't be used: %w", err)
	}
	keyPEM, err := encodeKey(key)
	if err != nil {
		return nil, nil, err
	}
	return append(encodeCertificate(leaf.Raw), keyPEM...), &tls.Certificate{
		Certificate: [][]byte{leaf.Raw, ca.Raw}, PrivateKey: key, Leaf: leaf,
	}, nil
}

// checkLeaf checks everything but the time, which the control plane's clock decides.
func checkLeaf(leaf *x509.Certificate, key crypto.PublicKey, ca *x509.Certificate, id string) error {
	public, ok := leaf.PublicKey.(interface{ Equal(crypto.PublicKey) bool })
	if !ok || !public.Equal(key) {
		return errors.New("it is for another key")
	}
	roots := x509.NewCertPool()
	roots.AddCert(ca)
	if _, err := leaf.Verify(x509.VerifyOptions{
		Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, CurrentTime: leaf.NotAfter,
	}); err != nil {
		return errors.New("it is no server certificate of the runner CA")
	}
	if len(leaf.URIs) != 1 || len(leaf.DNSNames)+len(leaf.IPAddresses)+len(leaf.EmailAddresses) > 0 {
		return errors.New("it must name the runner's SPIFFE id and nothing else")
	}
	if got, err := schemas.RunnerOfURI(leaf.URIs[0]); err != nil || got != id {
		return errors.New("it is of another runner")
	}
	return nil
}

// splitChain reads a leaf and, behind it, its CA.
func splitChain(body []byte) (leaf, ca *x509.Certificate, err error) {
	var certs []*x509.Certificate
	for rest := bytes.TrimSpace(body); len(rest) > 0; rest = bytes.TrimSpace(rest) {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil || block.Type != "CERTIFICATE" || len(certs) == 2 {
			return nil, nil, schemas.Errorf(schemas.CodeInvalid, "what came is not a certificate and its CA in PEM")
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, nil, schemas.Errorf(schemas.CodeInvalid, "the certificate that came can't be read")
		}
		certs = append(certs, cert)
	}
	if len(certs) != 2 {
		return nil, nil, schemas.Errorf(schemas.CodeInvalid, "what came is not a certificate and its CA in PEM")
	}
	return certs[0], certs[1], nil
}

func parseKey(body []byte) (crypto.Signer, error) {
	block, rest := pem.Decode(body)
	if block == nil || block.Type != "PRIVATE KEY" || len(bytes.TrimSpace(rest)) > 0 {
		return nil, errors.New("it is not one private key in PEM")
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, errors.New("its key can't be read")
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, errors.New("its key can't sign")
	}
	return signer, nil
}

func encodeKey(key crypto.Signer) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, errors.New("encode a private key")
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

func encodeCertificate(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}
