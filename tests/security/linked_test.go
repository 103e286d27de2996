package security

import (
	"context"
	"crypto"
	"crypto/tls"
	"errors"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus/seal"
	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/runner/intake"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
	"github.com/org-runink/runbus/tests/stack"
)

// linked is a runner of this name whose link is of that kind.
func linked(t *testing.T, plane *stack.Plane, link stack.Link, name string) *runner {
	t.Helper()
	if link == stack.OverDials {
		return dialled(t, plane, name)
	}
	b := benchOf(plane)
	if link == stack.OverWSS {
		b.url = plane.WebSocket
	}
	_, key := plane.Admin.MintKey(t, name)
	return b.runner(t, key, name)
}

// dialled is what a host does that has stolen the state folder of a dialled runner: it has the certificate, and nothing of the agent.
func dialled(t *testing.T, plane *stack.Plane, name string) *runner {
	t.Helper()
	owner := plane.StartDialled(t, name, nil)
	address := plane.Admin.Runners(t)[owner.ID].Address
	owner.Stop(t)
	store, err := identity.Open(filepath.Join(filepath.Dir(plane.DataDir), "runners", name))
	if err != nil {
		t.Fatal(err)
	}
	ref := schemas.RunnerRef{Tenant: store.Tenant(), Runner: store.RunnerID()}
	arrived := make(chan struct{}, 16)
	slot := &intake.Slot{Answers: func(context.Context) bool { return true }, Arrived: func() { arrived <- struct{}{} }}
	i, err := intake.Open(t.Context(), intake.Config{
		Listen: address,
		TLS: func(string) (*tls.Config, error) {
			return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{*store.Leaf()}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: store.CA()}, nil
		},
		Enrol: func(context.Context, *tls.Conn) error { return errors.New("it is enrolled") },
		Link: func(ctx context.Context, conn *tls.Conn, m *runbusv1.LinkPreface, leaf string) error {
			return slot.Offer(ctx, &intake.Link{Conn: conn, Leaf: leaf, Replica: m.GetReplica(), User: ref.String(), Password: m.GetToken()})
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- i.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-ended, store.Close()); err != nil {
			t.Error(err)
		}
		slot.Close()
	})
	plane.Admin.Must(t, http.MethodPost, "/api/runners/"+ref.Runner+"/connect", nil, nil)
	select {
	case <-arrived:
	case <-time.After(stack.Patience):
		t.Fatalf("%s was not dialled", name)
	}

	key, err := seal.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	signer, ok := store.Leaf().PrivateKey.(crypto.Signer)
	if !ok {
		t.Fatal("the key of the certificate can't sign")
	}
	r := &runner{ref: ref, nonce: schemas.NewID(), sealing: key.Public(), public: schemas.LeafKey(store.Fingerprint())}
	r.sign = func(input []byte) ([]byte, error) { return schemas.SignHello(signer, input) }
	for again := 0; ; again++ { // a link that was of no use is used up: the next one is dialled
		r.client, err = benchOf(plane).connect(t, nats.SetCustomDialer(slot), nats.UserInfoHandler(slot.UserInfo),
			nats.Name(schemas.ConnectName(ref.Runner, r.nonce)), nats.CustomInboxPrefix(schemas.InboxPrefix(ref)))
		if err == nil {
			break
		}
		if again == mostAgain {
			t.Fatalf("connect over the link: %v", err)
		}
		t.Logf("connected over the next link: %v", err)
		<-time.After(100 * time.Millisecond)
	}
	r.enrol(t)
	awaitLease(t, benchOf(plane).privileged(t, "sec"), ref.Runner)
	return r
}

// An id belongs to one kind, and a hello to the leaf that the registry has pinned: whatever a runner signs with, it enrols as nobody
// else.
func TestTheHelloOfADialledRunner(t *testing.T) {
	plane := stack.StartPlane(t, true, nil)
	r := linked(t, plane, stack.OverDials, "edge")
	outbound := linked(t, plane, stack.OverTLS, "far")
	_, stolen := plane.Admin.MintKey(t, "stolen")
	key, err := schemas.ParseServiceToken(stolen)
	if err != nil {
		t.Fatal(err)
	}
	public, err := key.Key.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	signed := func(by *runner, publicKey string, sign func([]byte) ([]byte, error)) *runbusv1.RunnerHello {
		h := by.signedHello(t, by.ref.Runner)
		h.PublicKey = publicKey
		if h.Signature, err = sign(schemas.HelloSigningInput(by.ref, h)); err != nil {
			t.Fatal(err)
		}
		return h
	}
	for name, c := range map[string]struct {
		by    *runner
		hello *runbusv1.RunnerHello
		text  string
		fatal bool
	}{
		"another one's signature":        {r, signed(r, r.public, key.Key.Sign), "the signature of the hello does not verify", true},
		"a key for a dialled id":         {r, signed(r, public, key.Key.Sign), "is that of a dialled runner: a service-account key can't use it", true},
		"a leaf that is not on record":   {r, signed(r, schemas.LeafKey("00"), r.sign), "is not that of the runner now", false},
		"a leaf for an outbound id":      {outbound, signed(outbound, r.public, r.sign), "is not that of a dialled runner", true},
		"a sealing key that was swapped": {r, changed(t, r), "the signature of the hello does not verify", true},
	} {
		answer := c.by.hello(t, c.hello)
		if !strings.Contains(answer.GetError().GetMessage(), c.text) || answer.GetFatal() != c.fatal || answer.GetSession() != "" {
			t.Errorf("%s: %v", name, answer)
		}
	}
	for _, by := range []*runner{r, outbound} {
		if answer := by.trueHello(t); answer.GetError() != nil || answer.GetSession() != by.session {
			t.Errorf("afterwards the hello of %s is answered with %v", by.ref, answer)
		}
	}
}

// changed is a hello with another sealing key than the signed one: what somebody in between would want.
func changed(t *testing.T, r *runner) *runbusv1.RunnerHello {
	h := r.signedHello(t, r.ref.Runner)
	h.SealingKey = append([]byte{}, h.SealingKey...)
	h.SealingKey[0] ^= 1
	return h
}
