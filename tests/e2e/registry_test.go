package e2e

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"github.com/org-runink/runbus/tests/stack"
)

// asSEC is JetStream as the control plane's own user of account SEC sees it.
func asSEC(t *testing.T, plane *stack.Plane) natsjs.JetStream {
	t.Helper()
	js, err := natsjs.New(asUser(t, plane, "sec"), natsjs.WithDefaultTimeout(stack.Patience))
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// asUser connects as one of the control plane's own users does, with its key from the data folder.
func asUser(t *testing.T, plane *stack.Plane, user string) *nats.Conn {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(plane.DataDir, "bus-keys.json"))
	if err != nil {
		t.Fatal(err)
	}
	var keys struct{ Seeds map[string]string }
	if err := json.Unmarshal(b, &keys); err != nil {
		t.Fatal(err)
	}
	key, err := nkeys.FromSeed([]byte(keys.Seeds[user]))
	if err != nil {
		t.Fatalf("the key of %s is damaged", user)
	}
	public, err := key.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	nc, err := stack.Connect(plane.NATS, nats.Nkey(public, key.Sign), nats.RootCAs(plane.CA))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// D7: while the registry can't be read a fetch ends as `failed` with `runner registry unavailable`, for a runner that is there
// and for one that never was; the control plane says that it is not ready. Each way in which a runner is linked has a bucket of its own.
func TestUnreadableRegistryIsNotUnknown(t *testing.T) {
	t.Parallel()
	for link, bucket := range map[stack.Link]string{stack.OverTLS: "KV_runbus_known", stack.OverDials: "KV_runbus_registry"} {
		t.Run(string(link), func(t *testing.T) {
			t.Parallel() // it waits until what is in memory is too old
			unreadableRegistryIsNotUnknown(t, link, bucket)
		})
	}
}

func unreadableRegistryIsNotUnknown(t *testing.T, link stack.Link, bucket string) {
	plane := stack.StartPlane(t, true, nil)
	plane.StartLinked(t, link, "edge", nil)
	src := newSource(t)
	if err := asSEC(t, plane).DeleteStream(t.Context(), bucket); err != nil {
		t.Fatal(err)
	}
	give := time.Now().Add(stack.Patience)
	for {
		status, body := plane.Admin.Call(t, http.MethodGet, "/readyz", nil)
		if status == http.StatusServiceUnavailable {
			var ready struct {
				Status string
				Checks map[string]string
			}
			if err := json.Unmarshal(body, &ready); err != nil || ready.Status != "not_ready" {
				t.Fatalf("%s: %v", body, err)
			}
			if ready.Checks["registry"] == "runner registry unavailable" { // else it is for another reason, which may pass
				break
			}
		}
		if time.Now().After(give) {
			t.Fatalf("the registry is still said to be readable: %s", body)
		}
		<-time.After(100 * time.Millisecond) // a state, not an event
	}
	for _, id := range []string{"edge", "nobody"} {
		f := plane.Admin.Fetch(t, src.body(id))
		if f.Status != http.StatusServiceUnavailable || f.Problem.Code != "failed" || f.Problem.Outcome != "failed" || f.Problem.Message != "runner registry unavailable" {
			t.Errorf("runner %s: %d %+v", id, f.Status, f.Problem)
		}
	}
	if n := src.requests(); n != 0 {
		t.Errorf("%d fetches reached the source", n)
	}
	if status, body := plane.Admin.Call(t, http.MethodGet, "/api/runners", nil); status != http.StatusServiceUnavailable {
		t.Errorf("the list: %d %s", status, body) // R1: 503, never an empty list
	}
}
