package runner

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// proof is how a runner proves who it is: to the bus, and in its hello. A runner that dials has a *credential, one that is dialled its
// leaf (*dialled).
type proof interface {
	// option authenticates a connection.
	option() nats.Option
	// sign puts public key and signature into a hello.
	sign(ref schemas.RunnerRef, h *runbusv1.RunnerHello) error
}

// credential is what a runner that dials proves itself with: a service-account key, or a person's session token, which the control
// plane refuses in its own words.
type credential struct {
	tenant  string // builds subjects, nothing else
	token   schemas.ServiceToken
	public  string
	session string // set: a person's
}

func parseCredential(token string) (*credential, error) {
	if schemas.IsSessionToken(token) {
		if _, err := schemas.SessionTokenHash(token); err != nil {
			return nil, err
		}
		return &credential{tenant: schemas.NoTenant, session: token}, nil
	}
	t, err := schemas.ParseServiceToken(token)
	if err != nil {
		return nil, err
	}
	public, err := t.Key.PublicKey()
	if err != nil {
		return nil, fmt.Errorf("service-account key: %w", err)
	}
	return &credential{tenant: t.Tenant, token: t, public: public}, nil
}

// option authenticates a connection: the key signs the server's nonce, its seed stays here.
func (c *credential) option() nats.Option {
	if c.session != "" {
		return nats.Token(c.session)
	}
	return nats.Nkey(c.public, c.token.Key.Sign)
}

// sign puts public key and signature into a hello.
func (c *credential) sign(ref schemas.RunnerRef, h *runbusv1.RunnerHello) error {
	if c.session != "" {
		return nil
	}
	sig, err := c.token.Key.Sign(schemas.HelloSigningInput(ref, h))
	if err != nil {
		return fmt.Errorf("sign the hello: %w", err)
	}
	h.PublicKey, h.Signature = c.public, sig
	return nil
}

// tokenFromFile reads RUNNER_ENROLL_TOKEN_FILE: a regular file, or a link to one, that its owner alone may read. In a file the
// token stays out of the environment, which others of the same user can see.
func tokenFromFile(name string) (string, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a FIFO must not hang the start
	if err != nil {
		return "", err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() {
		return "", fmt.Errorf("%s is not a regular file", name)
	}
	if mode := info.Mode().Perm(); mode != 0o600 && mode != 0o400 {
		return "", fmt.Errorf("%s has mode %04o and holds a token: chmod 600 it", name, mode)
	}
	const most = 4 << 10
	b, err := io.ReadAll(io.LimitReader(f, most+1))
	if err != nil {
		return "", err
	}
	token := strings.TrimSpace(string(b))
	if token == "" || len(b) > most {
		return "", errors.New(name + " holds no token")
	}
	return token, nil
}
