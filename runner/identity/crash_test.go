package identity_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/schemas"
)

const envJob = "RUNBUS_TEST_CRASH"

// job is what a child does, and at which step it kills itself.
type job struct {
	Dir    string
	Renew  bool
	At     int    // the step, counted from 1; 0: none
	CA     []byte // key and certificate of the test's CA
	Ticket string
	// Plane is a file in which the control plane of the test remembers what it decided: it takes one key for a ticket, and the next
	// certificate of a renewal.
	Plane string
}

// plane is that memory. The child may be killed after it was written: as a control plane lives on when a runner dies.
type plane struct {
	Key     string // of the one request that was taken
	Chain   []byte
	Current string // fingerprints
	Next    string
}

func childMain(text string) {
	var j job
	if err := json.Unmarshal([]byte(text), &j); err != nil {
		panic(err)
	}
	steps := 0
	s, err := identity.OpenWith(j.Dir, identity.Options{Step: func(string) {
		if steps++; steps == j.At {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {} // the signal is on its way
		}
	}})
	if err == nil {
		err = j.run(s)
	}
	if err != nil {
		_, _ = fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	_, _ = fmt.Fprintln(os.Stdout, steps)
	os.Exit(0)
}

func (j job) run(s *identity.Store) error {
	var p plane
	if body, err := os.ReadFile(j.Plane); err == nil {
		if err := json.Unmarshal(body, &p); err != nil {
			return err
		}
	}
	if j.Renew {
		if f := s.Fingerprint(); f == p.Next { // a fresh handshake shows it: promoted
			p.Current, p.Next = p.Next, ""
		} else if f != p.Current {
			return errors.New("the certificate in the folder is none that is valid")
		}
		if err := p.save(j.Plane); err != nil {
			return err
		}
		key, err := s.RenewalKey()
		if err != nil {
			return err
		}
		chain, fingerprint := j.sign(key.Public(), s.RunnerID())
		p.Next = fingerprint
		if err := p.save(j.Plane); err != nil {
			return err
		}
		return s.InstallNext(chain)
	}
	ticket, err := schemas.ParseTicket(j.Ticket)
	if err != nil {
		return err
	}
	if s.State() != identity.Enrolled {
		if err := s.Begin(ticket); err != nil {
			return err
		}
		key, err := s.PendingKey()
		if err != nil {
			return err
		}
		spki, err := x509.MarshalPKIXPublicKey(key.Public())
		if err != nil {
			return err
		}
		switch text := hex.EncodeToString(spki); p.Key {
		case "":
			p.Key = text
			p.Chain, p.Current = j.sign(key.Public(), ticket.RunnerID)
			if err := p.save(j.Plane); err != nil {
				return err
			}
		case text:
		default:
			return errors.New("the token was used already, with another key")
		}
		return s.InstallFirst(p.Chain, "acme")
	}
	return nil
}

func (p plane) save(file string) error {
	body, err := json.Marshal(p)
	if err != nil {
		return err
	}
	return os.WriteFile(file, body, 0o600)
}

// sign is the CA of the test, in the child.
func (j job) sign(key any, id string) (chain []byte, fingerprint string) {
	keyBlock, rest := pem.Decode(j.CA)
	certBlock, _ := pem.Decode(rest)
	private, err := x509.ParsePKCS8PrivateKey(keyBlock.Bytes)
	if err != nil {
		panic(err)
	}
	cert, err := x509.ParseCertificate(certBlock.Bytes)
	if err != nil {
		panic(err)
	}
	ca := &authority{cert: cert, key: private.(*ecdsa.PrivateKey)}
	chain = ca.sign(new(panics), key, leaf(id))
	block, _ := pem.Decode(chain)
	sum := sha256.Sum256(block.Bytes)
	return chain, hex.EncodeToString(sum[:])
}

// panics is the testing.TB of a child.
type panics struct{ testing.TB }

func (*panics) Helper()           {}
func (*panics) Fatal(args ...any) { panic(fmt.Sprint(args...)) }

// start runs the job in a process of its own. killed: it killed itself at its step; else it returns how many steps there were.
func (j job) start(t *testing.T) (steps int, killed bool) {
	t.Helper()
	body, err := json.Marshal(j)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), envJob+"="+string(body))
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err = cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
	case errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL && j.At > 0:
		return 0, true
	default:
		t.Fatalf("%v: %s", err, stderr.String())
	}
	if steps, err = strconv.Atoi(strings.TrimSpace(stdout.String())); err != nil {
		t.Fatal(err)
	}
	return steps, false
}

// killAtEveryStep kills a child at each step of the job, made anew by prepare, starts it again, and lets check look at the folder.
func killAtEveryStep(t *testing.T, prepare func() job, check func(t *testing.T, j job)) {
	t.Helper()
	whole := prepare()
	steps, _ := whole.start(t)
	if steps < 4 {
		t.Fatalf("only %d steps are told", steps)
	}
	check(t, whole)
	for at := 1; at <= steps; at++ {
		t.Run(fmt.Sprintf("step %d of %d", at, steps), func(t *testing.T) {
			j := prepare()
			j.At = at
			if _, killed := j.start(t); !killed {
				t.Fatal("the child was not killed")
			}
			j.At = 0
			j.start(t) // goes on
			check(t, j)
		})
	}
}

func TestKilledAtEveryStepOfAnEnrolment(t *testing.T) {
	ca := newAuthority(t)
	killAtEveryStep(t, func() job {
		return job{Dir: folder(t), Plane: folder(t), CA: ca.file(t), Ticket: ca.ticket(schemas.NewRunnerID()).Encode()}
	}, func(t *testing.T, j job) { wantOneCertificate(t, j) })
}

func TestKilledAtEveryStepOfARenewal(t *testing.T) {
	ca := newAuthority(t)
	killAtEveryStep(t, func() job {
		j := job{Dir: enrolled(t, ca, schemas.NewRunnerID()), Plane: folder(t), CA: ca.file(t), Renew: true}
		s := open(t, j.Dir)
		if err := (plane{Current: s.Fingerprint()}).save(j.Plane); err != nil {
			t.Fatal(err)
		}
		_ = s.Close()
		return j
	}, func(t *testing.T, j job) { wantOneCertificate(t, j) })
}

// wantOneCertificate checks that the folder has one certificate, which the control plane takes, and nothing left over.
func wantOneCertificate(t *testing.T, j job) {
	t.Helper()
	body, err := os.ReadFile(j.Plane)
	if err != nil {
		t.Fatal(err)
	}
	var p plane
	if err := json.Unmarshal(body, &p); err != nil {
		t.Fatal(err)
	}
	s := open(t, j.Dir)
	defer func() { _ = s.Close() }()
	want := p.Current
	if j.Renew {
		want = p.Next
	}
	if s.State() != identity.Enrolled || s.Fingerprint() != want {
		t.Fatalf("the folder is %s with %q, want %q", s.State(), s.Fingerprint(), want)
	}
	if got := files(t, j.Dir); len(got) != 3 {
		t.Fatalf("left over: %v", got)
	}
}

// file is the CA for a child.
func (a *authority) file(t *testing.T) []byte {
	t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(a.key)
	if err != nil {
		t.Fatal(err)
	}
	return append(encode("PRIVATE KEY", der), encode("CERTIFICATE", a.cert.Raw)...)
}
