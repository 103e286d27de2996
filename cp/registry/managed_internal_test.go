package registry

import (
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"testing"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// RUNNING is what a live heartbeat says, and nothing else (SPEC R7).
func TestTheManagedRunnersState(t *testing.T) {
	for _, c := range []struct {
		connected bool
		heartbeat string
		want      string
	}{{true, "fresh", StateRunning}, {true, "none", StateUnknown}, {false, "fresh", StateUnknown}, {false, "late", StateUnknown}} {
		r := Runner{Health: Health{Connected: c.connected, Signals: Signals{Heartbeat: c.heartbeat}}}
		describeManaged(&r)
		if r.State != c.want || (r.Description == "") != (c.want == StateRunning) {
			t.Errorf("connected %v with a %s heartbeat is %s, %q", c.connected, c.heartbeat, r.State, r.Description)
		}
	}
}

// One that has no process because a fetch starts it says so, and that nothing was observed all the same (SPEC R7).
func TestAManagedRunnerThatWaits(t *testing.T) {
	for detail, want := range map[string]string{
		startsWithFirstFetch: "liveness was not observed: it starts with its tenant's first fetch", startsWithNextFetch: "liveness was not observed: it starts with its tenant's next fetch",
		"not connected": "liveness was not observed: the registry has no live heartbeat of the managed runner",
	} {
		r := Runner{Health: Health{Detail: detail}}
		if describeManaged(&r); r.State != StateUnknown || r.Description != want {
			t.Errorf("%s: %s, %q", detail, r.State, r.Description)
		}
	}
}

// identity is a key as a managed runner's process makes it.
func identity(t *testing.T) (public []byte, private ed25519.PrivateKey) {
	t.Helper()
	key, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	if public, err = x509.MarshalPKIXPublicKey(key); err != nil {
		t.Fatal(err)
	}
	return public, private
}

// helloBy is the hello of ref, signed by private and naming public.
func helloBy(t *testing.T, ref schemas.RunnerRef, public []byte, private ed25519.PrivateKey) *runbusv1.RunnerHello {
	t.Helper()
	sum := sha256.Sum256(public)
	h := &runbusv1.RunnerHello{RunnerId: ref.Runner, ProcessNonce: "n1", SealingKey: []byte("key"), PublicKey: schemas.LeafKey(hex.EncodeToString(sum[:]))}
	signature, err := schemas.SignHello(private, schemas.HelloSigningInput(ref, h))
	if err != nil {
		t.Fatal(err)
	}
	h.Signature = signature
	return h
}

// The process that the control plane started may say hello as `console` of its tenant; nobody else may (SPEC E4, R2).
func TestWhoMaySayHelloAsConsole(t *testing.T) {
	acme := schemas.RunnerRef{Tenant: "acme", Runner: schemas.ConsoleRunner}
	rival := schemas.RunnerRef{Tenant: "rival", Runner: schemas.ConsoleRunner}
	public, private := identity(t)
	foreign, foreignPrivate := identity(t)
	keys := map[string][]byte{"acme": public, "rival": foreign}
	started := func(tenant string) ([]byte, bool) { key, ok := keys[tenant]; return key, ok }
	empty := sha256.Sum256(nil)
	service := helloBy(t, acme, public, private)
	service.PublicKey = "UABC"
	unsigned := helloBy(t, acme, public, private)
	unsigned.Signature = nil
	for name, c := range map[string]struct {
		managed func(string) ([]byte, bool)
		ref     schemas.RunnerRef
		hello   *runbusv1.RunnerHello
		code    schemas.Code // empty: it may
	}{
		"its process":                            {started, acme, helloBy(t, acme, public, private), ""},
		"another tenant's":                       {started, acme, helloBy(t, acme, foreign, foreignPrivate), schemas.CodeForbidden},
		"its process as another tenant's":        {started, rival, helloBy(t, rival, public, private), schemas.CodeForbidden},
		"its key, signed by another":             {started, acme, helloBy(t, acme, public, foreignPrivate), schemas.CodeForbidden},
		"its key, signed for another tenant":     {started, acme, helloBy(t, rival, public, private), schemas.CodeForbidden},
		"unsigned":                               {started, acme, unsigned, schemas.CodeForbidden},
		"a tenant whose runner is not up":        {started, schemas.RunnerRef{Tenant: "third", Runner: schemas.ConsoleRunner}, helloBy(t, schemas.RunnerRef{Tenant: "third", Runner: schemas.ConsoleRunner}, public, private), schemas.CodeForbidden},
		"a service-account key":                  {started, acme, service, schemas.CodeInvalid},
		"where there are no managed runners":     {nil, acme, helloBy(t, acme, public, private), schemas.CodeInvalid},
		"the hash of nothing, where none is up":  {func(string) ([]byte, bool) { return nil, false }, acme, &runbusv1.RunnerHello{RunnerId: "console", ProcessNonce: "n1", SealingKey: []byte("k"), PublicKey: schemas.LeafKey(hex.EncodeToString(empty[:]))}, schemas.CodeForbidden},
		"the hash of nothing, of an unknown key": {func(string) ([]byte, bool) { return nil, true }, acme, &runbusv1.RunnerHello{RunnerId: "console", ProcessNonce: "n1", SealingKey: []byte("k"), PublicKey: schemas.LeafKey(hex.EncodeToString(empty[:]))}, schemas.CodeForbidden},
	} {
		r := &Registry{d: Deps{Managed: c.managed}}
		key, err := r.verify(c.ref, c.hello)
		if c.code == "" {
			if err != nil || key.Tenant != "acme" || key.PublicKey != managedHolder {
				t.Errorf("%s: %+v, %v", name, key, err)
			}
		} else if schemas.CodeOf(err) != c.code {
			t.Errorf("%s: %+v, %v", name, key, err)
		}
	}
}
