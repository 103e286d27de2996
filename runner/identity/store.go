// Package identity is what a dialled runner is: the folder with its certificate and key (SPEC C6), the enrolment by ticket (C3–C5)
// and the renewal (C8, C13), on the runner's side.
package identity

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/org-runink/runbus/internal/durable"
	"github.com/org-runink/runbus/schemas"
)

// The files of the folder (SPEC C6). Each is replaced whole; identity.pem is the one that makes the runner enrolled.
const (
	fileIdentity = "identity.pem"    // certificate and private key
	fileCA       = "ca.pem"          // the runner CA
	fileRunner   = "runner.json"     // who this is
	filePending  = "key.pending.pem" // only during an enrolment or a renewal
	fileRevoked  = "revoked"         // after which the runner refuses to start
)

// RenewableFor is how long after its end a certificate can still be renewed, and do nothing else (SPEC C13).
const RenewableFor = 7 * 24 * time.Hour

// Options of a Store. The zero value is what production uses.
type Options struct {
	Step durable.Step // told of each step that changes the folder, for tests that end the process there
	Log  *slog.Logger // nil: slog.Default()
}

// Store is a state folder, held by this process alone. It is safe for concurrent use.
type Store struct {
	dir  string
	lock *os.File
	step durable.Step
	log  *slog.Logger

	mu      sync.Mutex
	state   State
	who     who
	ca      *x509.Certificate // once enrolled
	leaf    *tls.Certificate  // once enrolled
	pending crypto.Signer
	revoked string
}

// Open makes dir if it is missing and takes it for this process. It checks mode, owner and files before anything is trusted,
// and repairs what a crash in a change left; what it can't repair is an error of CodeInvalid that says what to do. A folder in use
// by another process is CodeConflict. A revoked folder opens, so that State can tell.
func Open(dir string) (*Store, error) { return OpenWith(dir, Options{}) }

// OpenWith is Open with options.
func OpenWith(dir string, o Options) (*Store, error) {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	lock, err := takeFolder(dir)
	if err != nil {
		return nil, err
	}
	s := &Store{dir: dir, lock: lock, step: o.Step, log: o.Log}
	if err := s.load(); err != nil {
		_ = lock.Close()
		return nil, err
	}
	return s, nil
}

// Close gives the folder back.
func (s *Store) Close() error { return s.lock.Close() }

// load reads the folder and finishes or takes back what a crash interrupted.
func (s *Store) load() error {
	for _, name := range []string{fileIdentity, fileCA, fileRunner, filePending, fileRevoked} {
		if err := durable.RemoveTemp(s.file(name)); err != nil {
			return fmt.Errorf("clean the state folder: %w", err)
		}
	}
	if err := s.look(); err != nil || s.state != Enrolled {
		return err
	}
	if _, err := s.read(filePending); err == nil {
		// Installed, or never to be: a renewal makes a fresh key each time.
		s.log.Info("an interrupted enrolment or renewal left its key: it is removed, the certificate in place is whole", "runner", s.who.ID)
	} else if !errors.Is(err, fs.ErrNotExist) {
		s.log.Warn("what an interrupted renewal left can't be read and is removed", "file", filePending, "error", err)
	}
	return durable.Remove(s.file(filePending), s.step)
}

// look reads and checks the folder, and changes nothing.
func (s *Store) look() error {
	reason, err := s.read(fileRevoked)
	if err == nil {
		s.state, s.revoked = Revoked, revokedReason(reason)
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	identity, err := s.read(fileIdentity)
	switch {
	case err == nil:
		return s.loadEnrolled(identity)
	case errors.Is(err, fs.ErrNotExist):
		return s.loadUnenrolled()
	}
	return err
}

func (s *Store) loadEnrolled(identity []byte) error {
	if err := s.loadWho(); err != nil {
		return err
	}
	if s.who.Tenant == "" {
		return damaged(fileRunner, "it names no tenant")
	}
	caPEM, err := s.readNeeded(fileCA)
	if err != nil {
		return err
	}
	if s.ca, err = parseCA(caPEM, s.who.CASHA256); err != nil {
		return damaged(fileCA, err.Error())
	}
	if s.leaf, err = parseIdentity(identity, s.ca, s.who.ID); err != nil {
		return damaged(fileIdentity, err.Error())
	}
	s.state = Enrolled
	return nil
}

func (s *Store) loadUnenrolled() error {
	key, err := s.read(filePending)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // runner.json and ca.pem by themselves mean nothing
	} else if err != nil {
		return err
	}
	if err := s.loadWho(); err != nil {
		return err
	}
	if s.pending, err = parseKey(key); err != nil {
		return damaged(filePending, err.Error())
	}
	s.state = Pending
	return nil
}

// State is what the folder says now.
func (s *Store) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}

// RunnerID is the runner's id, "" in an Empty folder.
func (s *Store) RunnerID() string { return s.whoNow().ID }

// Name is the runner's name when it was enrolled.
func (s *Store) Name() string { return s.whoNow().Name }

// Tenant builds the runner's subjects; "" before it is enrolled.
func (s *Store) Tenant() string { return s.whoNow().Tenant }

func (s *Store) whoNow() who {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.who
}

// Leaf is the certificate with its key and chain to present now; nil before it is enrolled. It may have expired.
func (s *Store) Leaf() *tls.Certificate {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leaf
}

// Fingerprint is the hex SHA-256 of Leaf, "" without one.
func (s *Store) Fingerprint() string {
	if leaf := s.Leaf(); leaf != nil {
		return FingerprintOf(leaf.Leaf)
	}
	return ""
}

// CA holds the runner CA alone; nil before it is enrolled.
func (s *Store) CA() *x509.CertPool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ca == nil {
		return nil
	}
	pool := x509.NewCertPool()
	pool.AddCert(s.ca)
	return pool
}

// caSHA256 is the hash of the CA that the folder, or the ticket it began with, trusts.
func (s *Store) caSHA256() ([32]byte, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.who.CASHA256, s.state == Pending || s.state == Enrolled
}

// Begin starts the enrolment of an Empty folder, or goes on with the one of the same runner: the key stays the same, so that a
// certificate whose delivery was cut off is delivered again. It is CodeConflict when the ticket is of another runner or CA
// than the folder, or the folder is enrolled or revoked.
func (s *Store) Begin(t schemas.Ticket) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.fits(t); err != nil || s.state == Pending {
		return err
	}
	w := who{ID: t.RunnerID, Name: t.Name, CASHA256: t.CASHA256}
	if err := s.write(fileRunner, w.encode()); err != nil {
		return err
	}
	key, err := s.makeKey()
	if err != nil {
		return err
	}
	s.state, s.who, s.pending = Pending, w, key
	return nil
}

// fits is nil if an enrolment with t can begin here, or goes on.
func (s *Store) fits(t schemas.Ticket) error {
	switch {
	case s.state == Revoked:
		return s.errRevoked()
	case s.state == Enrolled && s.who.ID == t.RunnerID:
		return errEnrolledAlready(t)
	case s.state != Empty && s.who.ID != t.RunnerID:
		return errOtherRunner(s.who, t)
	case s.state == Pending && s.who.CASHA256 != t.CASHA256:
		return errOtherCA(t)
	}
	return nil
}

// PendingKey is the key of the enrolment that Begin started.
func (s *Store) PendingKey() (crypto.Signer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending == nil {
		return nil, schemas.Errorf(schemas.CodeConflict, "no enrolment or renewal is under way")
	}
	return s.pending, nil
}

// RenewalKey makes a fresh key for a renewal. A key made before is forgotten: a certificate for it can't be installed any more.
func (s *Store) RenewalKey() (crypto.Signer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state != Enrolled {
		return nil, schemas.Errorf(schemas.CodeConflict, "the runner is not enrolled (%s): there is nothing to renew", s.state)
	}
	s.pending = nil
	key, err := s.makeKey()
	if err != nil {
		return nil, err
	}
	s.pending = key
	return key, nil
}

func (s *Store) makeKey() (crypto.Signer, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make a key: %w", err)
	}
	body, err := encodeKey(key)
	if err != nil {
		return nil, err
	}
	return key, s.write(filePending, body)
}

// InstallFirst ends an enrolment: chainPEM is the certificate and the CA behind it. Both are checked against the key and the CA
// that Begin fixed. When it returns nil the runner is enrolled, also after a crash.
func (s *Store) InstallFirst(chainPEM []byte, tenant string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state != Pending {
		return schemas.Errorf(schemas.CodeConflict, "no enrolment is under way: the state folder is %s", s.state)
	}
	if err := schemas.ValidTenant(tenant); err != nil {
		return err
	}
	leaf, ca, err := splitChain(chainPEM)
	if err != nil {
		return err
	}
	if sha256.Sum256(ca.Raw) != s.who.CASHA256 {
		return schemas.Errorf(schemas.CodeForbidden, "the certificate that came is of another CA than the ticket's")
	}
	body, cert, err := assemble(leaf, s.pending, ca, s.who.ID)
	if err != nil {
		return err
	}
	w := s.who
	w.Tenant = tenant
	if err := s.write(fileCA, encodeCertificate(ca.Raw)); err != nil {
		return err
	}
	if err := s.write(fileRunner, w.encode()); err != nil {
		return err
	}
	if err := s.write(fileIdentity, body); err != nil {
		return err
	}
	s.state, s.who, s.ca, s.leaf = Enrolled, w, ca, cert
	return s.forgetPending()
}

// InstallNext ends a renewal with a certificate for the key of the last RenewalKey. From then on Leaf is the new one.
func (s *Store) InstallNext(chainPEM []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state != Enrolled || s.pending == nil {
		return schemas.Errorf(schemas.CodeConflict, "no renewal is under way")
	}
	leaf, _, err := splitChain(chainPEM)
	if err != nil {
		return err
	}
	body, cert, err := assemble(leaf, s.pending, s.ca, s.who.ID)
	if err != nil {
		return err
	}
	if err := s.write(fileIdentity, body); err != nil {
		return err
	}
	s.leaf = cert
	return s.forgetPending()
}

func (s *Store) forgetPending() error {
	s.pending = nil
	if err := durable.Remove(s.file(filePending), s.step); err != nil {
		return fmt.Errorf("state folder: %w", err)
	}
	return nil
}

// MarkRevoked makes every later start refuse (SPEC C9).
func (s *Store) MarkRevoked(reason string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state == Revoked {
		return nil
	}
	if err := s.write(fileRevoked, encodeRevoked(reason, time.Now())); err != nil {
		return err
	}
	s.state, s.revoked = Revoked, reason
	return nil
}

// Usable is nil when a runner can start on this folder at now, with a ticket to begin with or without; else it says what to do.
// A certificate that has expired less than RenewableFor ago is usable: for its renewal.
func (s *Store) Usable(now time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch s.state {
	case Revoked:
		return s.errRevoked()
	case Empty:
		return errNoTicket()
	case Enrolled:
		if end := s.leaf.Leaf.NotAfter; now.After(end.Add(RenewableFor)) {
			return ErrExpired(end, now)
		}
	case Pending:
	}
	return nil
}

func (s *Store) file(name string) string { return filepath.Join(s.dir, name) }

func (s *Store) write(name string, body []byte) error {
	if err := durable.Replace(s.file(name), body, s.step); err != nil {
		return fmt.Errorf("state folder: %w", err)
	}
	return nil
}

func (s *Store) loadWho() error {
	body, err := s.readNeeded(fileRunner)
	if err != nil {
		return err
	}
	if s.who, err = parseWho(body); err != nil {
		return damaged(fileRunner, err.Error())
	}
	return nil
}

func (s *Store) readNeeded(name string) ([]byte, error) {
	body, err := s.read(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, damaged(name, "it is missing")
	}
	return body, err
}

// FingerprintOf is the hex SHA-256 of a certificate, by which the registry pins it.
func FingerprintOf(cert *x509.Certificate) string {
	sum := sha256.Sum256(cert.Raw)
	return hex.EncodeToString(sum[:])
}
