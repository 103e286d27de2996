package stack

import (
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
)

// Link is one way in which a runner and its control plane come together.
type Link string

// The ways. What is above the link must not know which one it is.
const (
	OverTLS   Link = "outbound over TLS"
	OverWSS   Link = "outbound over WebSocket"
	OverDials Link = "dialled"
)

// Links are all of them.
var Links = []Link{OverTLS, OverWSS, OverDials}

// EachLink runs a test once for each way.
func EachLink(t *testing.T, test func(t *testing.T, link Link)) {
	t.Helper()
	for _, link := range Links {
		t.Run(string(link), func(t *testing.T) { test(t, link) })
	}
}

// StartLinked is StartRunner over that link: a runner that fetches reach under this name. A dialled one has another id.
func (p *Plane) StartLinked(t testing.TB, link Link, name string, env map[string]string) *Runner {
	t.Helper()
	switch link {
	case OverDials:
		return p.StartDialled(t, name, env)
	case OverWSS:
		all := map[string]string{"RUNNER_ENROLL_ADDR": p.WebSocket}
		maps.Copy(all, env)
		return p.StartRunner(t, name, all)
	default:
		return p.StartRunner(t, name, env)
	}
}

// Created is what the creation of a dialled runner answers.
type Created struct {
	Runner  RunnerState `json:"runner"`
	Ticket  string      `json:"ticket"`
	Command string      `json:"command"`
	TokenID string      `json:"tokenId"`
}

// Create registers a runner to be dialled at this address.
func (a *API) Create(t testing.TB, name, address string) Created {
	t.Helper()
	var made Created
	a.Must(t, http.MethodPost, "/api/runners", map[string]any{"name": name, "address": address}, &made)
	return made
}

// DialledEnv is the environment of a dialled runner that listens there.
func (p *Plane) DialledEnv(name, address string) map[string]string {
	return map[string]string{
		"CORE_RUNNER_LISTEN": address, "CORE_RUNNER_STATE_DIR": filepath.Join(filepath.Dir(p.DataDir), "runners", name),
	}
}

// StartDialled registers a runner of this name at a free loopback port, starts `core-runner serve` with its ticket, and waits until it
// is enrolled and linked.
func (p *Plane) StartDialled(t testing.TB, name string, env map[string]string) *Runner {
	t.Helper()
	address := FreeAddress(t, "127.0.0.1:0")
	made := p.Admin.Create(t, name, address)
	all := p.DialledEnv(name, address)
	all["CORE_RUNNER_TICKET"] = made.Ticket
	maps.Copy(all, env)
	return p.StartListening(t, made.Runner.ID, name, all)
}

// RestartDialled starts a runner that has enrolled before.
func (p *Plane) RestartDialled(t testing.TB, id, name, address string) *Runner {
	t.Helper()
	return p.StartListening(t, id, name, p.DialledEnv(name, address))
}

// StartListening starts `core-runner serve` with exactly this environment, which has it listen, has it dialled at once, and waits
// until it is linked.
func (p *Plane) StartListening(t testing.TB, id, name string, env map[string]string) *Runner {
	t.Helper()
	r := &Runner{Process: Start(t, "runner "+name, p.Bin.CoreRunner, env, "serve"), ID: id}
	r.Stderr.Must(t, "listening for the control plane")
	p.Admin.Must(t, http.MethodPost, "/api/runners/"+id+"/connect", nil, nil)
	p.awaitEnrolled(t, r)
	return r
}

// Ports of FreeAddress are below those that a system gives to whoever asks for any: else one that is given back is soon another
// process's, as the port that it listens on or the one that it dials from.
const (
	firstFreePort = 10_000
	lastFreePort  = 32_000
)

// claimed are the UDP sockets that keep the ports of FreeAddress from other tests, also from those of other processes, for as long as
// this process lives: a runner may not listen there yet, or be away for a while. Ports of UDP are apart from those of TCP.
var claimed struct {
	mu   sync.Mutex
	held []net.PacketConn
}

// FreeAddress is an address on which nobody listens, with the host of listen, whose port is 0. No other test on this machine gets it.
func FreeAddress(t testing.TB, listen string) string {
	t.Helper()
	host, _, err := net.SplitHostPort(listen)
	for tries := 0; err == nil && tries < 100; tries++ {
		port := firstFreePort + rand.IntN(lastFreePort-firstFreePort) //nolint:gosec // no secret
		address := net.JoinHostPort(host, strconv.Itoa(port))
		claim, taken := new(net.ListenConfig).ListenPacket(t.Context(), "udp", address)
		if taken != nil {
			continue
		}
		l, taken := new(net.ListenConfig).Listen(t.Context(), "tcp", address)
		if taken != nil {
			_ = claim.Close()
			continue
		}
		_ = l.Close()
		claimed.mu.Lock()
		claimed.held = append(claimed.held, claim)
		claimed.mu.Unlock()
		return l.Addr().String()
	}
	t.Fatalf("no address of %s is free: %v", listen, err)
	return ""
}
