package auth

import (
	"context"
	"errors"
	"log/slog"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
)

// Subjects are what a user may publish and subscribe: allow-lists, neither may be empty.
type Subjects struct{ Publish, Subscribe []string }

// CalloutConfig is what ServeCallout needs. All fields but Log and Ready are required.
type CalloutConfig struct {
	Conn *nats.Conn // in account AUTH
	Sys  *nats.Conn // in account SYS, to cut the connections of a revoked key
	Jail *bus.Conn  // in account JAIL, to tell refused clients why
	// Issuer signs the answers, XKey opens the requests and seals the answers.
	Issuer, XKey nkeys.KeyPair
	// OpsPublic and OpsSysPublic are the public nkeys of ops, and Ops and OpsSys what they may do in OPS and SYS.
	OpsPublic, OpsSysPublic string
	Ops, OpsSys             Subjects
	// Bound is the public key that holds a runner's id, if one does. It answers from memory.
	Bound func(ref schemas.RunnerRef) (publicKey string, ok bool)
	// Ready, if not nil, is called once when requests are being answered.
	Ready func()
	Log   *slog.Logger // nil: the log of Auth
}

// ServeCallout answers the server's authorization requests until ctx ends; it blocks. See the files callout*.go.
func (a *Auth) ServeCallout(ctx context.Context, c CalloutConfig) error {
	return errors.ErrUnsupported
}
