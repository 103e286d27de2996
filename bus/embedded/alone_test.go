package embedded

import (
	"fmt"
	"net/url"
	"runtime"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// Whoever watches at another server is seen from the moment on at which what they subscribe is known here.
func TestWatchedElsewhere(t *testing.T) {
	const most = 3 * time.Minute // for what takes a moment
	node := func(name, routes string) (*server.Server, *server.Options) {
		t.Helper()
		o := &server.Options{}
		if err := o.ProcessConfigString(fmt.Sprintf(`server_name: %s
listen: "127.0.0.1:-1"
accounts { OPS { users: [ {user: ops, password: ops} ] } }
cluster { name: c, listen: "127.0.0.1:-1", routes: [ %s ] }
`, name, routes)); err != nil {
			t.Fatal(err)
		}
		o.NoSigs, o.NoLog = true, true
		s, err := server.NewServer(o)
		if err != nil {
			t.Fatal(err)
		}
		s.Start()
		t.Cleanup(func() {
			s.Shutdown()
			s.WaitForShutdown()
		})
		if !s.ReadyForConnections(most) {
			t.Fatal("a server is not ready")
		}
		return s, o
	}
	there, _ := node("there", "")
	nc, err := nats.Connect(there.ClientURL(), nats.UserInfo("ops", "ops"), nats.Timeout(most))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	if _, err := nc.SubscribeSync("runbus.v1.>"); err != nil {
		t.Fatal(err)
	}
	if err := nc.FlushTimeout(most); err != nil {
		t.Fatal(err)
	}
	here, o := node("here", "nats://"+there.ClusterAddr().String())
	w := watchers{alone: alone(o)}
	if w.ops, err = here.LookupAccount("OPS"); err != nil {
		t.Fatal(err)
	}
	for give := time.Now().Add(most); !w.ops.SubscriptionInterest("runbus.v1.x"); runtime.Gosched() {
		if time.Now().After(give) {
			t.Fatal("what is subscribed at the other server is not known here")
		}
	}
	if !w.some() || !w.watched("runbus.v1.x") {
		t.Error("who watches at the other server is not seen")
	}
	if w.watched("other") {
		t.Error("what nobody subscribes is watched")
	}
}

// Only a server that no other can be connected to is alone.
func TestAlone(t *testing.T) {
	leaf, err := url.Parse("nats://127.0.0.1:1")
	if err != nil {
		t.Fatal(err)
	}
	if !alone(&server.Options{Port: 4222}) {
		t.Error("a server by itself is not alone")
	}
	for what, o := range map[string]server.Options{
		"cluster": {Cluster: server.ClusterOpts{Port: -1}}, "routes": {Routes: []*url.URL{leaf}},
		"gateway": {Gateway: server.GatewayOpts{Name: "g"}}, "leaf nodes": {LeafNode: server.LeafNodeOpts{Port: -1}},
		"remote": {LeafNode: server.LeafNodeOpts{Remotes: []*server.RemoteLeafOpts{{URLs: []*url.URL{leaf}}}}},
	} {
		if alone(&o) {
			t.Errorf("a server with %s is alone", what)
		}
	}
}
