package bustest

import (
	"encoding/base64"
	"sync"
	"testing"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/schemas"
)

const (
	calloutSubject = "$SYS.REQ.USER.AUTH"
	serverXKey     = "Nats-Server-Xkey"
)

// calloutDouble stands in for the control plane's callout: it lets in the runners it made keys for and the ops users, with
// the permissions of the real one, and nobody else.
type calloutDouble struct {
	mu      sync.Mutex
	runners map[string]schemas.RunnerRef // by public key
}

func (b *Bus) serveDouble(t testing.TB) *calloutDouble {
	t.Helper()
	b.callout.Do(func() {
		b.double = &calloutDouble{runners: make(map[string]schemas.RunnerRef)}
		b.double.serve(t, b)
	})
	return b.double
}

func (d *calloutDouble) serve(t testing.TB, b *Bus) {
	t.Helper()
	nc, err := b.Connect(embedded.UserAuth, b.quiet())
	if err != nil {
		t.Fatalf("connect the callout's double: %v", err)
	}
	if _, err := nc.Subscribe(calloutSubject, func(m *nats.Msg) { d.answer(b, nc, m) }); err != nil {
		t.Fatalf("subscribe the callout's double: %v", err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatalf("subscribe the callout's double: %v", err)
	}
}

func (d *calloutDouble) addRunner(t testing.TB, ref schemas.RunnerRef) (public string, sign nats.SignatureHandler) {
	t.Helper()
	pair, err := nkeys.CreateUser()
	if err != nil {
		t.Fatalf("key of a test's runner: %v", err)
	}
	public, err = pair.PublicKey()
	if err != nil {
		t.Fatalf("key of a test's runner: %v", err)
	}
	d.trust(public, ref)
	return public, pair.Sign
}

func (d *calloutDouble) trust(public string, ref schemas.RunnerRef) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.runners[public] = ref
}

// answer decides about one client. It answers a request it can't read with nothing: the server refuses the client then.
func (d *calloutDouble) answer(b *Bus, nc *nats.Conn, m *nats.Msg) {
	keys := b.Keys
	server := m.Header.Get(serverXKey)
	body, err := keys.XKey().Open(m.Data, server)
	if err != nil {
		b.out.printf("callout double: open the request: %v", err)
		return
	}
	request, err := jwt.DecodeAuthorizationRequestClaims(string(body))
	if err != nil {
		b.out.printf("callout double: decode the request: %v", err)
		return
	}
	response := jwt.NewAuthorizationResponseClaims(request.UserNkey)
	response.Audience = request.Server.ID
	if user := d.user(keys, request); user == nil {
		response.Error = "unknown to the test"
	} else if response.Jwt, err = user.Encode(keys.Issuer()); err != nil {
		b.out.printf("callout double: encode the user: %v", err)
		return
	}
	token, err := response.Encode(keys.Issuer())
	if err != nil {
		b.out.printf("callout double: encode the response: %v", err)
		return
	}
	sealed, err := keys.XKey().Seal([]byte(token), server)
	if err != nil {
		b.out.printf("callout double: seal the response: %v", err)
		return
	}
	if err := nc.Publish(m.Reply, sealed); err != nil {
		b.out.printf("callout double: answer: %v", err)
	}
}

// user is what the client becomes, nil if it is refused. The key is proven by the signature over the server's nonce, as in
// the real callout.
func (d *calloutDouble) user(keys *embedded.Keys, r *jwt.AuthorizationRequestClaims) *jwt.UserClaims {
	public := r.ConnectOptions.Nkey
	if !signed(public, r.ClientInformation.Nonce, r.ConnectOptions.SignedNonce) {
		return nil
	}
	d.mu.Lock()
	ref, isRunner := d.runners[public]
	d.mu.Unlock()
	user := jwt.NewUserClaims(r.UserNkey)
	var publish, subscribe []string
	switch {
	case isRunner:
		user.Audience, user.Name = "RUN", ref.String()
		publish, subscribe = schemas.RunnerPermissions(ref)
	case public == keys.OpsPublic():
		user.Audience, user.Name = "OPS", "ops"
		publish, subscribe = embedded.OpsPermissions()
	case public == keys.OpsSysPublic():
		user.Audience, user.Name = "SYS", "ops-sys"
		publish, subscribe = embedded.OpsSysPermissions()
	default:
		return nil
	}
	user.Pub.Allow.Add(publish...)
	user.Sub.Allow.Add(subscribe...)
	return user
}

func signed(public, nonce, signature string) bool {
	pair, err := nkeys.FromPublicKey(public)
	if err != nil {
		return false
	}
	sig, err := base64.RawURLEncoding.DecodeString(signature)
	return err == nil && pair.Verify([]byte(nonce), sig) == nil
}

func seedOption(t testing.TB, seed []byte) nats.Option {
	t.Helper()
	pair, err := nkeys.FromSeed(seed)
	if err != nil {
		t.Fatalf("key of ops: %v", err)
	}
	public, err := pair.PublicKey()
	if err != nil {
		t.Fatalf("key of ops: %v", err)
	}
	return nats.Nkey(public, pair.Sign)
}
