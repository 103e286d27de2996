package e2e

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/tests/stack"
)

// C8 under load, and C13: certificates are renewed again and again while fetches run, none of which is lost, also not one that runs
// across a renewal; and the certificate that was replaced is refused. RUNBUS_SOAK=10m makes it a soak of certificates of a minute.
func TestRenewalsUnderLoad(t *testing.T) {
	t.Parallel()                     // it waits for clocks most of the time
	life, until := "30s", time.Now() // a third of it is what a replaced certificate is shown in
	const renewals = 2               // at least
	if soak := os.Getenv("RUNBUS_SOAK"); soak != "" {
		d, err := time.ParseDuration(soak)
		if err != nil {
			t.Fatal(err)
		}
		life, until = "60s", time.Now().Add(d)
	}
	plane := stack.StartPlane(t, true, map[string]string{"CORE_RUNNER_LEAF_LIFE": life})
	runner := plane.StartDialled(t, "edge", map[string]string{"RUNNER_CONCURRENCY": "8"})
	identity := filepath.Join(filepath.Dir(plane.DataDir), "runners", "edge", "identity.pem")
	read := func() string {
		t.Helper()
		body, err := os.ReadFile(identity)
		if err != nil {
			t.Fatal(err)
		}
		return string(body)
	}
	held, quick := newSource(t), newSource(t)
	quick.let()
	across := plane.Admin.Fetch(t, held.body("edge"))
	await(t, "the request that is held", held.opened)

	seen, fetches := []string{read()}, 0
	for len(seen) <= renewals || time.Now().Before(until) {
		var together []*stack.Fetch
		for range 4 {
			together = append(together, plane.Admin.Fetch(t, quick.body("edge")))
		}
		for _, f := range together {
			if end := f.End(); end.Outcome != "completed" || end.Rows != rowsBefore+rowsAfter {
				t.Fatalf("after %d fetches and %d renewals one ended %+v", fetches, len(seen)-1, end)
			}
			fetches++
		}
		for range together {
			await(t, "the request", quick.opened) // the source counts into a channel
		}
		if now := read(); now != seen[len(seen)-1] {
			if seen = append(seen, now); len(seen) == 2 {
				held.let()
			}
		}
	}
	if end := across.End(); end.Outcome != "completed" || end.Rows != rowsBefore+rowsAfter {
		t.Errorf("the fetch across a renewal ended %+v", end)
	}
	t.Logf("%d fetches, %d renewals", fetches, len(seen)-1)

	// What was replaced, from a backup of the folder. It has not expired yet, unless this machine is very slow.
	promoted := plane.Stderr.Must(t, "fingerprint="+hexOf(fingerprintOf(t, seen[len(seen)-1])))
	placed := runner.Stderr.Must(t, "the renewed certificate is in place")
	for _, line := range []string{promoted, placed, runner.Stderr.Must(t, "a renewal of the certificate has begun")} {
		if !strings.Contains(line, "level=INFO") || !strings.Contains(line, "until=") || strings.Contains(line, "error") {
			t.Errorf("a renewal that goes well is told by %s", line)
		}
	}
	address := plane.Admin.Runners(t)[runner.ID].Address
	runner.Signal(t, syscall.SIGKILL)
	runner.Exit(t)
	plane.Admin.AwaitRunner(t, runner.ID, false)
	newest := read()
	if newest == seen[len(seen)-2] {
		t.Fatal("nothing was renewed")
	}
	replace := func(body string) {
		t.Helper()
		if err := os.WriteFile(identity, []byte(body), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	replace(seen[len(seen)-2])
	old := stack.Start(t, "runner with the old certificate", plane.Bin.CoreRunner, plane.DialledEnv("edge", address), "serve")
	old.Stderr.Must(t, "listening for the control plane")
	plane.Admin.Must(t, http.MethodPost, "/api/runners/"+runner.ID+"/connect", nil, nil)
	if err := plane.Stderr.Match(regexp.MustCompile(`the link was refused: .* is not the one on record|has not the certificate of`)); err != nil {
		t.Errorf("the log does not say that the certificate was replaced: %v", err)
	}
	if got := plane.Admin.Runners(t)[runner.ID]; got.Health.Dispatchable || strings.Contains(old.Stderr.String(), "the control plane has dialled") {
		t.Error("a replaced certificate got a link")
	}
	old.Signal(t, syscall.SIGKILL)
	old.Exit(t)
	replace(newest)
	runner = plane.RestartDialled(t, runner.ID, "edge", address)
	fetchFrom(t, plane, quick, "edge")

	// C13: the host was off while its certificate expired.
	runner.Signal(t, syscall.SIGKILL)
	runner.Exit(t)
	<-time.After(time.Until(leafOf(t, read()).NotAfter))
	back := plane.RestartDialled(t, runner.ID, "edge", address)
	back.Stderr.Must(t, "renewed an expired certificate")
	fetchFrom(t, plane, quick, "edge")
}

// leafOf is the certificate in the content of an identity.pem.
func leafOf(t *testing.T, identity string) *x509.Certificate {
	t.Helper()
	block, _ := pem.Decode([]byte(identity))
	if block == nil {
		t.Fatal("no certificate")
	}
	leaf, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return leaf
}

func fingerprintOf(t *testing.T, identity string) []byte {
	t.Helper()
	sum := sha256.Sum256(leafOf(t, identity).Raw)
	return sum[:]
}
