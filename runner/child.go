package runner

import (
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	buslink "github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/runner/intake"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// prefaceWithin is how long a link that was handed over may take to say whose it is.
const prefaceWithin = 10 * time.Second

// child is what a managed runner has that its control plane started on the same host (SPEC M1, `local`): the lifeline, over which its
// links come, and a key that this process made and that no file, variable or command line ever had.
type child struct {
	linked
	lifeline *buslink.Lifeline
	key      ed25519.PrivateKey
	public   []byte // of key: SubjectPublicKeyInfo
	first    chan schemas.RunnerRef
	ref      schemas.RunnerRef // of serve alone; set by the first link
}

// What a caller can do about what a child refuses: its operator is the control plane's, who sets it up by variables of other names.
const (
	childPolicy = "the operator of the control plane decides this: `--managed-policy` of `runink up`, or MANAGED_RUNNER_POLICY; without it the built-in rules of a shared control plane hold"
	childBusy   = "try again when one has ended, or raise MANAGED_RUNNER_CONCURRENCY on the control plane"
	// A child keeps its journal below the data folder of the control plane, and writes into its log.
	childJournal = "the control plane's log has the cause: its disk is full, perhaps"

	childFolders = "the operator of the control plane lists the folders, for the tenant local alone: `--files` of `runink up`, or MANAGED_RUNNER_FILE_ROOTS"
)

var childFiles = source.FileHints{
	None:    childFolders,
	Outside: childFolders,
	Missing: "the path is one of the control plane's host; a relative one begins in a folder of MANAGED_RUNNER_FILE_ROOTS (`runink up`: --files)",
	NoMatch: "the managed runner sees files below MANAGED_RUNNER_FILE_ROOTS (`runink up`: --files) only",
}

// worded is err with the hint that a child gives, if this runner is one.
func (a *Agent) worded(err *schemas.Error, childs string) *schemas.Error {
	if a.child != nil {
		err = err.WithHint(childs)
	}
	return err
}

// openChild takes the lifeline over and greets the control plane.
func openChild(c *Config) (*child, error) {
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		return nil, err
	}
	spki, err := x509.MarshalPKIXPublicKey(public)
	if err != nil {
		return nil, err
	}
	lifeline, err := buslink.InheritLifeline(c.Lifeline)
	if err != nil {
		return nil, configError("RUNNER_LIFELINE: %w: it is set by the control plane that starts its managed runner, and by nobody else", err)
	}
	if err := lifeline.Greet(&runbusv1.ChildGreeting{PublicKey: spki}); err != nil {
		_ = lifeline.Close()
		return nil, fmt.Errorf("greet the control plane: %w", err)
	}
	x := &child{lifeline: lifeline, key: private, public: spki, first: make(chan schemas.RunnerRef, 1)}
	x.open(c.Log)
	return x, nil
}

// errOrphaned ends a runner whose control plane is gone: what it runs has nobody to go to.
var errOrphaned = errors.New("the control plane that started this runner is gone")

// serve takes the links until the control plane is gone or ctx ends.
func (c *child) serve(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() { _ = c.lifeline.Close() })()
	for {
		conn, err := c.lifeline.Take()
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, io.EOF):
			return errOrphaned
		case err != nil:
			return fmt.Errorf("lifeline: %w", err)
		}
		if err := c.offer(ctx, conn); err != nil {
			_ = conn.Close()
			c.log.Warn("a link of the control plane was not taken", "error", err)
		}
	}
}

// offer takes one link. The first says who this runner is.
func (c *child) offer(ctx context.Context, conn net.Conn) error {
	p, err := buslink.Receive(conn, time.Now().Add(prefaceWithin))
	if err != nil {
		return err
	}
	ref := schemas.RunnerRef{Tenant: p.GetTenant(), Runner: p.GetRunnerId()}
	if err := ref.Valid(); err != nil {
		return err
	}
	begins := c.ref == schemas.RunnerRef{}
	if !begins && ref != c.ref {
		return schemas.Errorf(schemas.CodeInvalid, "this process is %s", c.ref)
	}
	if err := c.slot.Offer(ctx, &intake.Link{Conn: conn, Replica: p.GetReplica(), User: ref.String(), Password: p.GetToken()}); err != nil {
		return err
	}
	if begins {
		c.ref = ref
		c.first <- ref
	}
	return nil
}

// who waits for the first link.
func (c *child) who(ctx context.Context) (schemas.RunnerRef, error) {
	select {
	case ref := <-c.first:
		return ref, nil
	case <-ctx.Done():
		return schemas.RunnerRef{}, ctx.Err()
	}
}

// sign signs a hello with the key of this process.
func (c *child) sign(ref schemas.RunnerRef, h *runbusv1.RunnerHello) error {
	sig, err := schemas.SignHello(c.key, schemas.HelloSigningInput(ref, h))
	if err != nil {
		return fmt.Errorf("sign the hello: %w", err)
	}
	sum := sha256.Sum256(c.public)
	h.PublicKey, h.Signature = schemas.LeafKey(hex.EncodeToString(sum[:])), sig
	return nil
}

// close frees what is left when the agent has ended.
func (c *child) close() {
	c.slot.Close()
	_ = c.lifeline.Close()
}
