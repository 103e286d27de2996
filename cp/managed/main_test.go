package managed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/internal/leak"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// patience bounds every wait of a test: it is only used up by one that fails.
const patience = 2 * time.Minute

// asChild makes this program the child: what kind of one, its value says.
const asChild = "RUNBUS_TEST_CHILD"

func TestMain(m *testing.M) {
	if kind := os.Getenv(asChild); kind != "" {
		os.Exit(behave(kind))
	}
	leak.Main(m)
}

// word is what a child says first on each link: how it was started.
type word struct {
	PID       int
	Arguments []string
	Environ   []string
	Folder    string
	Files     []string // that it has, beside its standard ones and the lifeline
}

// behave is the whole life of a child.
func behave(kind string) int {
	files := inheritedFiles()
	lifeline, err := link.InheritLifeline(lifelineDescriptor)
	if err != nil {
		return 2
	}
	stop := make(chan os.Signal, 1)
	if kind == "unmoved" {
		signal.Ignore(syscall.SIGTERM)
	} else {
		signal.Notify(stop, syscall.SIGTERM)
	}
	switch kind {
	case "fails":
		return 7
	case "mute": // and no runner
		_, _ = os.Stdout.WriteString("hello\n")
		if err := lifeline.Greet(&runbusv1.ChildGreeting{}); err != nil {
			return 2
		}
		<-stop
		return 0
	}
	if err := lifeline.Greet(&runbusv1.ChildGreeting{PublicKey: fmt.Appendf(nil, "key of %d", os.Getpid())}); err != nil {
		return 2
	}
	here, err := os.Getwd()
	if err != nil {
		return 2
	}
	said, err := json.Marshal(word{os.Getpid(), os.Args, os.Environ(), here, files})
	if err != nil {
		return 2
	}
	orphaned := make(chan struct{})
	go func() {
		defer close(orphaned)
		for links := 0; ; links++ {
			conn, err := lifeline.Take()
			if err != nil {
				return
			}
			if kind == "deaf" && links > 0 {
				_ = conn.Close()
				continue
			}
			go func() {
				defer conn.Close()
				p, err := link.Receive(conn, time.Now().Add(patience))
				if err != nil || link.Take(conn) != nil {
					return
				}
				_, _ = fmt.Fprintf(conn, "%s %s\n%s\n", p.GetTenant(), p.GetToken(), said)
				_, _ = io.Copy(io.Discard, conn)
			}()
		}
	}()
	select {
	case <-stop:
		return 0
	case <-orphaned:
		return 3
	}
}

func inheritedFiles() (names []string) {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return []string{err.Error()}
	}
	for _, e := range entries {
		var fd int
		if _, err := fmt.Sscan(e.Name(), &fd); err != nil || fd <= lifelineDescriptor {
			continue
		}
		switch to, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); {
		case errors.Is(err, os.ErrNotExist): // that of ReadDir
		case strings.HasPrefix(to, "anon_inode:"), strings.HasPrefix(to, "/sys/fs/cgroup/"): // of Go's runtime itself
		default:
			names = append(names, e.Name()+" "+to)
		}
	}
	return names
}

// plane is what the control plane is to Runners.
type plane struct {
	*Runners
	stop  func() // ends Run, and waits
	links chan arrival
	ended chan string // tenants whose process has ended

	mu      sync.Mutex
	up      map[string]net.Conn // link of each tenant
	changed chan struct{}
}

// arrival is a link that a child took.
type arrival struct {
	tenant, token string
	word
	conn net.Conn
}

func start(t *testing.T, kind string, change func(*Config)) *plane {
	t.Helper()
	t.Setenv("GORACE", "atexit_sleep_ms=0")
	p := &plane{links: make(chan arrival, 64), ended: make(chan string, 1024), up: map[string]net.Conn{}, changed: make(chan struct{})}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := Config{
		Command: []string{self, "serve"}, Env: map[string]string{asChild: kind}, StateDir: filepath.Join(t.TempDir(), "managed"), Own: "own",
		Replica: "here", ServerID: func() string { return "server" }, Server: p.server, Fit: p.fit, Changed: p.change, Ended: func(_ context.Context, tenant string) { p.ended <- tenant },
		Sign: func(who auth.LinkIdentity, serverID string, _ time.Time) (string, error) {
			return who.Ref.String() + "," + who.Fingerprint + "," + serverID, nil
		},
		FirstRetry: 20 * time.Millisecond, SlowestRetry: 100 * time.Millisecond, UpWithin: patience, StopWithin: patience,
	}
	if change != nil {
		change(&c)
	}
	if p.Runners, err = New(c); err != nil {
		t.Fatal(err)
	}
	p.run(t)
	return p
}

// server is the NATS server's end of a link: it hears the child's word.
func (p *plane) server() (net.Conn, error) {
	mine, theirs := net.Pipe()
	go func() {
		var a arrival
		if _, err := fmt.Fscanln(mine, &a.tenant, &a.token); err != nil {
			return
		}
		if err := json.NewDecoder(mine).Decode(&a.word); err != nil {
			return
		}
		a.conn = mine
		p.set(a.tenant, mine)
		p.links <- a
		_, _ = io.Copy(io.Discard, mine)
		p.drop(a.tenant, mine)
	}()
	return theirs, nil
}

func (p *plane) set(tenant string, conn net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.up[tenant] = conn
	p.told()
}

// drop is called at the end of a link, whose place another may have by then.
func (p *plane) drop(tenant string, conn net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.up[tenant] == conn {
		delete(p.up, tenant)
		p.told()
	}
}

// told wakes who waits for a change. p.mu must be held.
func (p *plane) told() {
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *plane) fit(tenant string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.up[tenant] != nil
}

func (p *plane) change() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.changed
}
