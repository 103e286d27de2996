package secrets

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/schemas"
	"github.com/org-runink/runbus/tests/stack"
)

// leak is one that is planted on purpose: leaks/<name>.patch, whose head says what it does, and which findings show it.
type leak struct {
	name, what, file string
	findings         []string // regular expressions
}

var leakHead = regexp.MustCompile(`\A# (.*)\n# Leak: (.*)\n\n--- a/`)

func leaks(t *testing.T) (all []leak) {
	t.Helper()
	files, err := filepath.Glob("leaks/*.patch")
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 15 {
		t.Fatalf("only %d leaks", len(files))
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		head := leakHead.FindStringSubmatch(string(b))
		if head == nil {
			t.Fatalf("%s does not begin with what it does and what it leaks", file)
		}
		absolute, err := filepath.Abs(file)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, leak{strings.TrimSuffix(filepath.Base(file), ".patch"), head[1], absolute, strings.Split(head[2], "; ")})
	}
	return all
}

// Each leak that is planted, one in each kind of place, is found, by its kind and its place; and no report shows a secret.
func TestPlantedLeaksAreFound(t *testing.T) {
	dir := t.TempDir()
	if err := stack.CopyModule(dir); err != nil {
		t.Fatal(err)
	}
	all := leaks(t)
	for _, l := range all {
		if err := stack.Patch(dir, l.file); err != nil {
			t.Fatalf("%s: %v", l.name, err)
		}
	}
	bin, err := stack.BuildCopy(dir)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	journey := exec.CommandContext(ctx, self, "-test.run", "^TestNothingComesOut$", "-test.v", "-test.timeout", "14m", "-plain")
	journey.Env = append(os.Environ(), stack.BinariesEnv+"="+bin)
	journey.WaitDelay = time.Minute // for what it printed last
	var out bytes.Buffer
	journey.Stdout, journey.Stderr = &out, &out
	if journey.Run() == nil {
		t.Fatal("the journey passed")
	}
	var found []string
	for line := range strings.Lines(out.String()) {
		if _, finding, ok := strings.Cut(line, ": LEAK "); ok {
			found = append(found, strings.TrimSpace(finding))
		}
	}
	for _, l := range all {
		if l.name == "core-files" && !makesCores(t) {
			t.Logf("%-22s not looked for: this host puts core files elsewhere", l.name)
			continue
		}
		for _, want := range l.findings {
			pattern := regexp.MustCompile("^" + want)
			if !anyMatches(pattern, found) {
				t.Errorf("MISSED %s (%s): no %q", l.name, l.what, want)
			} else {
				t.Logf("%-22s found: %s", l.name, want)
			}
		}
	}
	if t.Failed() {
		t.Logf("found: %s\n%s", strings.Join(found, "\n"), out.String())
	}
	for _, finding := range found {
		for _, secret := range []string{rightSecret, wrongSecret, proxySecret, headerSecret, schemas.ServiceTokenPrefix, schemas.SessionTokenPrefix, schemas.TicketPrefix} {
			if strings.Contains(finding, secret) {
				t.Error("a finding shows a secret")
			}
		}
	}
}

func anyMatches(pattern *regexp.Regexp, lines []string) bool {
	for _, line := range lines {
		if pattern.MatchString(line) {
			return true
		}
	}
	return false
}

// makesCores reports whether this host puts core files into the folder of the process.
func makesCores(t *testing.T) bool {
	t.Helper()
	pattern, err := os.ReadFile("/proc/sys/kernel/core_pattern")
	var limit syscall.Rlimit
	if err := errors.Join(err, syscall.Getrlimit(syscall.RLIMIT_CORE, &limit)); err != nil {
		t.Fatal(err)
	}
	return limit.Cur > 0 && !strings.ContainsAny(string(pattern), "|/") && strings.TrimSpace(string(pattern)) != ""
}
