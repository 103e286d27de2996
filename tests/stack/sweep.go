package stack

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"github.com/org-runink/runbus/schemas"
	"github.com/org-runink/runbus/tests/canary"
)

// sweepWithin bounds what is asked of a control plane at its end: one that a test has wedged answers nothing.
const sweepWithin = 20 * time.Second

// Sweep asks a control plane that still runs for all that it shows, and reads the streams that it holds in memory; those on disk are
// files. It is done at the end of every test.
func (p *Plane) Sweep(t testing.TB) {
	t.Helper()
	select {
	case <-p.Exited():
		return
	default:
	}
	ctx, cancel := context.WithTimeout(context.Background(), sweepWithin)
	defer cancel()
	client := http.Client{Transport: Listen(t, http.DefaultTransport)}
	for _, path := range []string{
		"/metrics", "/livez", "/readyz", "/openapi.json", "/api/session", "/api/people", "/api/service-account-keys", "/api/runners", "/api/tenants",
		"/api/audit?limit=1000", "/api/fetches", "/api/fetches/running", "/no/such/page",
	} {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.HTTP+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+p.Admin.Token)
		resp, err := client.Do(req)
		if err != nil {
			t.Logf("the end of the control plane: %v", err) // it was wedged, or another listens there
			return
		}
		if err := drain(resp); err != nil {
			t.Logf("the end of the control plane: %s: %v", path, err)
		}
	}
	nc, err := p.Connect("sec")
	if err == nil {
		err = InspectStreams(ctx, t, nc)
		nc.Close()
	}
	if err != nil {
		t.Logf("the streams at the end: %v", err)
	}
}

// InspectStreams looks at all messages of the streams in memory of account SEC, to which nc is connected; what ops sees in memory is a copy
// of one of them. Those on disk are files.
func InspectStreams(ctx context.Context, t testing.TB, nc *nats.Conn) error {
	t.Helper()
	js, err := natsjs.New(nc)
	if err != nil {
		return err
	}
	list := js.ListStreams(ctx)
	for info := range list.Info() {
		if info.Config.Storage != natsjs.MemoryStorage {
			continue
		}
		stream, err := js.Stream(ctx, info.Config.Name)
		if err != nil {
			return err
		}
		for seq := info.State.FirstSeq; seq > 0 && seq <= info.State.LastSeq; seq++ {
			m, err := stream.GetMsg(ctx, seq)
			if errors.Is(err, natsjs.ErrMsgNotFound) {
				continue
			}
			if err != nil {
				return err
			}
			sink := "stream " + info.Config.Name
			Inspect(t, sink, append([]byte(m.Subject+"\n"), m.Data...), mayStore(info.Config.Name))
			for name, values := range m.Header {
				for _, v := range values {
					Inspect(t, "header "+name+" in "+sink, []byte(v), nothing)
				}
			}
		}
	}
	return list.Err()
}

// mayStore is what a stream is there to hold: what proves a ticket's token until it is used, in memory (SPEC C3).
func mayStore(stream string) func(canary.Secret) bool {
	if stream != "KV_runbus_proofs" {
		return nothing
	}
	return func(s canary.Secret) bool { return s.Kind == canary.ProofKey }
}

// Connect connects as one of the control plane's own users, or as ops, with the seed in its data folder.
func (p *Plane) Connect(user string) (*nats.Conn, error) {
	text, err := os.ReadFile(filepath.Join(p.DataDir, "bus-keys.json"))
	if err != nil {
		return nil, err
	}
	var keys struct{ Seeds map[string]string }
	if err := json.Unmarshal(text, &keys); err != nil {
		return nil, schemas.Errorf(schemas.CodeInvalid, "bus-keys.json can't be read")
	}
	pair, err := nkeys.FromSeed([]byte(keys.Seeds[user]))
	if err != nil {
		return nil, err
	}
	public, err := pair.PublicKey()
	if err != nil {
		return nil, err
	}
	options := []nats.Option{nats.Nkey(public, pair.Sign), nats.Name("sweep"), nats.NoReconnect(), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {})}
	if p.Env["RUNBUS_NATS_PLAINTEXT"] != "true" && p.CA != "" {
		options = append(options, nats.RootCAs(p.CA))
	}
	return Connect(p.NATS, options...)
}
