package policy

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Keeper holds the policy in force and the bytes sent under it today. Safe for concurrent use. Make it with Open.
type Keeper struct {
	file  string
	kinds []string
	usage *usage
	now   func() time.Time
	held  atomic.Pointer[Policy]
	owner string // the hint of what the policy refuses
}

// Word has what the policy refuses say this about whose the policy is, instead of that the runner's host decides. It is called before
// the first Begin.
func (k *Keeper) Word(hint string) { k.owner = hint }

// Open reads the policy in file; an empty name means none, and everything is allowed. stateDir is where the counts of budgets a day
// are kept: it must be writable if the policy has such a budget.
func Open(file, stateDir string, kinds []string) (*Keeper, error) {
	k := &Keeper{file: file, kinds: kinds, now: time.Now, owner: ownerHint}
	k.usage = &usage{file: filepath.Join(stateDir, "policy-usage.json"), credit: map[string]int64{}}
	if file == "" {
		return k, nil
	}
	return k, k.Reload()
}

// Reload reads the file anew. On an error the policy in force stays. Fetches that run go on under the policy they began with.
func (k *Keeper) Reload() error {
	p, err := ReadFile(k.file, k.kinds)
	if err != nil {
		return err
	}
	if p.Daily() {
		if err := k.usage.check(day(k.now())); err != nil {
			return err
		}
	}
	k.held.Store(p)
	return nil
}

// ReadFile parses a policy file, which must be a regular one. Its errors begin with the file's name and have a line for each fault.
func ReadFile(name string, kinds []string) (*Policy, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a FIFO must not hang the start
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", name)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, err
	}
	p, err := Parse(text, kinds)
	if err != nil {
		return nil, errors.New(name + ": " + strings.ReplaceAll(err.Error(), "\n", "\n"+name+": "))
	}
	return p, nil
}

// Policy is the one in force; nil without a file.
func (k *Keeper) Policy() *Policy { return k.held.Load() }

// maxNames is how many rule names a hello tells.
const maxNames = 100

// Statement is what a hello tells of the policy (SPEC E12): never hosts, addresses or paths.
func (k *Keeper) Statement() *runbusv1.RunnerPolicy {
	p := k.Policy()
	if p == nil {
		return &runbusv1.RunnerPolicy{DefaultVerdict: Allow}
	}
	s := &runbusv1.RunnerPolicy{
		Digest: p.Digest(), DefaultVerdict: p.Default,
		AllowRules: int32(len(p.Allow)), DenyRules: int32(len(p.Deny)), // at most maxRules
	}
	for _, rules := range [][]Rule{p.Deny, p.Allow} {
		for i := range rules {
			if len(s.RuleNames) < maxNames {
				s.RuleNames = append(s.RuleNames, rules[i].Label())
			}
		}
	}
	return s
}

func day(t time.Time) string { return t.UTC().Format(time.DateOnly) }
