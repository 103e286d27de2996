package cli

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/tests/stack"
)

// elsewhere stands before a control plane as what spreads calls over replicas, and hands every DELETE to one at which no fetch runs. asked gets
// the path of each.
func elsewhere(t *testing.T, plane string) (url string, asked <-chan string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	paths := make(chan string, 16)
	var all sync.WaitGroup
	all.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return // closed
			}
			all.Go(func() {
				defer conn.Close()
				from := bufio.NewReader(conn)
				if b, err := from.Peek(len("DELETE ")); err != nil || string(b) != "DELETE " {
					through(conn.(*net.TCPConn), from, plane)
					return
				}
				req, err := http.ReadRequest(from)
				if err != nil {
					t.Error(err)
					return
				}
				const body = `{"code":"not_found","detail":"no such fetch is running","hint":"it may have ended already"}`
				resp := &http.Response{
					ProtoMajor: 1, ProtoMinor: 1, StatusCode: http.StatusNotFound, Close: true, ContentLength: int64(len(body)),
					Header: http.Header{"Content-Type": {"application/problem+json"}}, Body: io.NopCloser(strings.NewReader(body)),
				}
				paths <- req.URL.Path // before anybody knows
				if err := resp.Write(conn); err != nil {
					t.Error(err)
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		all.Wait()
	})
	return "http://" + l.Addr().String(), paths
}

// through passes on what comes on conn, and its end, and what comes back.
func through(conn *net.TCPConn, from io.Reader, plane string) {
	to, err := net.Dial("tcp", strings.TrimPrefix(plane, "http://"))
	if err != nil {
		return
	}
	defer to.Close()
	var there sync.WaitGroup
	there.Go(func() {
		_, _ = io.Copy(to, from)
		_ = to.(*net.TCPConn).CloseWrite()
	})
	_, _ = io.Copy(conn, to)
	_ = conn.Close()
	there.Wait()
}

// Ctrl-C stops a fetch down to its source, too, when the cancel is answered by a replica at which it does not run.
func TestCtrlCThatAnotherReplicaAnswers(t *testing.T) {
	u := startUp(t, t.TempDir(), filepath.Join(t.TempDir(), "data"))
	source, opened, gone := held(t)
	url, asked := elsewhere(t, u.HTTP)
	env := map[string]string{"HOME": t.TempDir()}
	if r := run(t, u.bin.Runink, env, "context", "add", "--url", url, "--token-file", filepath.Join(u.DataDir, "local-admin.token"), "front"); r.status != 0 {
		t.Fatal(r)
	}
	args := []string{"fetch", "run", "--runner", "local", "--source", "http", "--set", "url=" + source, "--set", "format=jsonl"}

	// How far the fetch is stands on the screen when Ctrl-C comes: it is known, and the cancel asked for by its id.
	status, screen, id := 0, "", ""
	stack.Again(t, u.Stderr, func() (int, string) {
		p := onTerminal(t, env, u.bin.Runink, args...)
		began := p.awaitOr(t, "the request", opened) && p.shows(t, "accepted by", "connecting", "querying", "streaming")
		pressed := time.Now()
		if began {
			_, _ = p.keyboard.WriteString("\x03")
			await(t, "the source's client to go", gone)
			t.Logf("the source's client was gone after %s", time.Since(pressed))
		}
		status, screen, id = p.exit(t), p.seen.String(), cancelOf(asked)
		return status, screen
	})
	if id == "" {
		t.Errorf("the cancel was not asked for: status %d, %q", status, screen)
	}
	untold(t, status, screen, id)

	// The id came ahead of an answer that never began: Ctrl-C finds it there, or hangs up.
	stack.Again(t, u.Stderr, func() (int, string) {
		p := stack.Start(t, "fetch with an early id", u.bin.Runink, env, append(args, "--format", "csv", "--early-id")...)
		select {
		case <-opened:
			p.Signal(t, syscall.SIGINT)
			await(t, "the source's client to go", gone)
		case <-p.Exited():
		}
		status, screen, id = p.Exit(t), p.Stdout.String()+p.Stderr.String(), cancelOf(asked)
		return status, screen
	})
	untold(t, status, screen, id)
	u.Stop(t)
}

// cancelOf is the dispatch whose cancel a command has asked for that has ended, "" if it has not.
func cancelOf(asked <-chan string) string {
	select {
	case path := <-asked:
		return strings.TrimPrefix(path, "/api/fetches/")
	default:
		return ""
	}
}

// untold fails unless the fetch was cancelled: with its outcome, or with none that is known, and the way to it, where that did not come in time.
func untold(t *testing.T, status int, text, id string) {
	t.Helper()
	unknown := status == 4 && id != "" && strings.Contains(text, "runink fetch trace "+id)
	if status != 1 && !unknown || !strings.Contains(text, "cancelled") || id != "" && !strings.Contains(text, id) {
		t.Errorf("status %d, dispatch %q: %q", status, id, text)
	}
}
