// Package arch holds the map of the house against the code: who may import whom.
package arch

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"strings"
	"testing"
)

const module = "github.com/org-runink/runbus/"

type pkg struct {
	ImportPath string
	Deps       []string
	Imports    []string
}

func packages(t *testing.T, patterns ...string) []pkg {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-json=ImportPath,Deps,Imports"}, patterns...)...)
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var all []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

// below reports whether path is the module's folder dir or in it.
func below(path, dir string) bool {
	return path == module+dir || strings.HasPrefix(path, module+dir+"/")
}

func TestWhoImportsWhom(t *testing.T) {
	for _, rule := range []struct {
		who       string
		forbidden []string
		why       string
	}{
		{"schemas", []string{"bus", "jetstream", "cp", "runner", "cmd", "tests"}, "the contract imports nothing of ours"},
		{"bus", []string{"jetstream", "cp", "runner", "cmd"}, "the bus stands on schemas alone"},
		{"jetstream", []string{"bus", "cp", "runner", "cmd"}, "the state stands on schemas alone"},
		{"runner", []string{"cp", "cmd", "jetstream", "bus/embedded"}, "a runner knows the control plane by the bus only"},
		{"cp", []string{"runner", "cmd"}, "a control plane knows runners by the bus only, and runs no fetch"},
		{"cmd/core-runner", []string{"cp", "jetstream", "bus/embedded"}, "a customer's runner carries no server"},
	} {
		for _, p := range packages(t, "./"+rule.who+"/...") {
			for _, dep := range p.Deps {
				for _, f := range rule.forbidden {
					if below(dep, f) {
						t.Errorf("%s depends on %s: %s", p.ImportPath, dep, rule.why)
					}
				}
			}
		}
	}
}

func TestChildrenOfCPNeverImportIt(t *testing.T) {
	for _, p := range packages(t, "./cp/...") {
		if p.ImportPath == module+"cp" {
			continue
		}
		for _, dep := range p.Imports {
			if dep == module+"cp" {
				t.Errorf("%s imports cp", p.ImportPath)
			}
		}
	}
}

func TestTheServerIsImportedInOnePlace(t *testing.T) {
	for _, p := range packages(t, "./...") {
		for _, dep := range p.Imports {
			if strings.HasPrefix(dep, "github.com/nats-io/nats-server/") && p.ImportPath != module+"bus/embedded" {
				t.Errorf("%s imports %s: only bus/embedded may", p.ImportPath, dep)
			}
		}
	}
}

func TestCoreRunnerIsLean(t *testing.T) {
	for _, p := range packages(t, "./cmd/core-runner") {
		for _, dep := range p.Deps {
			for _, heavy := range []string{"github.com/nats-io/nats-server/", "k8s.io/", "cloud.google.com/", "github.com/aws/", "github.com/Azure/", "google.golang.org/grpc"} {
				if strings.HasPrefix(dep, heavy) {
					t.Errorf("core-runner carries %s", dep)
				}
			}
		}
	}
}
