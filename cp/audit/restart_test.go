package audit

import (
	"encoding/json"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/internal/natsdial"
)

// Restarts in the middle of writing: what was acknowledged is there, and nothing is there twice.
func TestRestartsWhileWriting(t *testing.T) {
	b := bustest.Start(t)
	ctx := ctxOf(t)
	s := openStore(t, b, overTCP(t, b))
	logs := []*Log{newLog(t, b, s, "one"), newLog(t, b, s, "two")}
	var all sync.WaitGroup
	var mu sync.Mutex
	acknowledged := map[string]bool{}
	progress := make(chan struct{}, 100_000)
	end := make(chan struct{})
	for _, l := range logs {
		run(t, l)
		for range 4 {
			all.Go(func() {
				for {
					select {
					case <-end:
						return
					default:
					}
					e := event("acme", l.writer)
					if err := l.Record(ctx, e); err == nil {
						mu.Lock()
						acknowledged[e.GetId()] = true
						mu.Unlock()
						progress <- struct{}{}
					}
				}
			})
		}
	}
	for range 3 {
		for range 200 {
			select {
			case <-progress:
			case <-ctx.Done():
				t.Fatal("nothing is written any more")
			}
		}
		b.Restart(t)
	}
	for len(progress) > 0 {
		<-progress
	}
	<-progress // it goes on
	close(end)
	all.Wait()
	found := ids(t, s)
	for id := range acknowledged {
		if found[id] != 1 {
			t.Fatalf("an acknowledged event is there %d times", found[id])
		}
	}
	for id, n := range found {
		if n != 1 {
			t.Fatalf("event %s is there %d times", id, n)
		}
	}
	for _, l := range logs {
		if n, err := l.Verify(ctx); err != nil {
			t.Fatal(err)
		} else {
			t.Logf("%d events, %d acknowledged, %d batches", len(found), len(acknowledged), n)
		}
	}
}

// overTCP is a connection in SEC that survives a restart of the server.
func overTCP(t testing.TB, b *bustest.Bus, o ...nats.Option) *nats.Conn {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(b.Dir, "keys.json"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Seeds map[string]string `json:"seeds"`
	}
	if err := json.Unmarshal(raw, &file); err != nil {
		t.Fatal(err)
	}
	key, err := nkeys.FromSeed([]byte(file.Seeds[string(embedded.UserSec)]))
	if err != nil {
		t.Fatal(err)
	}
	nc, err := natsdial.Connect(time.Minute, b.URL(), append([]nats.Option{
		nats.RootCAs(b.CAFile), nats.Nkey(b.Keys.Public(embedded.UserSec), key.Sign), nats.MaxReconnects(-1),
		nats.ReconnectWait(20 * time.Millisecond), nats.IgnoreDiscoveredServers(), nats.IgnoreAuthErrorAbort(), nats.Timeout(time.Minute),
	}, o...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}
