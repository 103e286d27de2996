package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/org-runink/runbus/runner/identity"
	chain "github.com/org-runink/runbus/runner/journal"
	"github.com/org-runink/runbus/runner/policy"
	"github.com/org-runink/runbus/runner/source/all"
)

// host looks at what the runner needs here.
func (d *doctor) host() {
	if d.cfg.StateDir == "" {
		d.cfg.StateDir = DefaultStateDir
	}
	if d.dials() {
		d.check("state", "", d.state)
	} else {
		d.check("state", "", d.identity)
		d.check("ticket", "", d.ticket)
	}
	d.check("journal", "", d.journal)
	d.check("policy", "", d.policy)
	d.check("files", "", d.files)
}

// state finds out whether the state folder of a runner that dials can be written, by writing.
func (d *doctor) state() finding {
	dir := d.cfg.StateDir
	const todo = "make it a folder of mode 0700 of the runner's user, or name another by CORE_RUNNER_STATE_DIR (--state-dir)"
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR):
		if err := identity.Makeable(dir); err != nil {
			return d.stateless(err, todo)
		}
		return warn(dir+" is not there yet: the runner makes it", todoNotYet)
	case err != nil:
		return fail(err.Error(), todo)
	case !info.IsDir():
		return fail(dir+" is not a folder", todo)
	}
	f, err := os.CreateTemp(dir, ".doctor-*")
	if err == nil {
		err = errors.Join(f.Close(), os.Remove(f.Name()))
	}
	if err != nil {
		return d.stateless(err, todo)
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return warn(fmt.Sprintf("%s can be written, and has mode %04o: others see what is in it", dir, mode), "chmod 700 it")
	}
	if d.cfg.ID == "" {
		if _, err := readID(filepath.Join(dir, "runner-id")); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fail(err.Error(), "restore the file runner-id, or remove it: the runner then makes a new id")
		}
	}
	return good("%s can be written", dir)
}

// stateless is what it means that a runner that dials has no state folder, or can't write it, as err says: one that needs it for its id,
// its journal or its policy's budgets a day does not start.
func (d *doctor) stateless(err error, todo string) finding {
	if d.cfg.ID != "" && d.cfg.Journal != JournalOn && !d.counts() {
		return warn(err.Error()+": the runner works without it, and keeps no journal", todo)
	}
	return fail(err.Error(), todo)
}

// counts reports whether the policy has a budget a day, which is counted in the state folder.
func (d *doctor) counts() bool {
	if d.cfg.Policy == "" {
		return false
	}
	p, err := policy.ReadFile(d.cfg.Policy, all.Kinds())
	return err == nil && p.Daily()
}

// journal checks the chain of the journal that is there.
func (d *doctor) journal() finding {
	if d.cfg.Journal == JournalOff {
		return good("none is kept (RUNNER_JOURNAL=off)")
	}
	dir := JournalDir(d.cfg.StateDir)
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return good("%s has no records yet", dir)
	}
	report, err := chain.Verify(dir, chain.VerifyOptions{})
	if err != nil {
		return fail("it can't be read: "+err.Error(), "run the doctor as the runner's user; core-runner journal verify tells more")
	}
	if !report.OK {
		if part, err := chain.Check(context.Background(), dir); err == nil && part.OK && part.Records > 0 {
			first := part.Last.Seq - part.Records + 1
			return good("whole from record %d on: %d records in %s. The files before are not here: that is no break if you moved them away (`core-runner journal verify --after` checks what follows them)",
				first, part.Records, dir)
		}
		return fail("it is not whole: "+report.Break.String(), "somebody changed it, or the disk did: keep a copy, and see core-runner journal verify")
	}
	return good("whole: %d records in %s", report.Records, dir)
}

// policy reads the policy file as the runner does.
func (d *doctor) policy() finding {
	if d.cfg.Policy == "" {
		return good("none (RUNNER_POLICY): every source is allowed, but never a cloud-metadata address")
	}
	p, err := policy.ReadFile(d.cfg.Policy, all.Kinds())
	if err != nil {
		return fail(err.Error(), "the runner does not start with it: mend the file (core-runner policy check shows each fault)")
	}
	return good("%s: %d allow, %d deny, else %s; digest %s", d.cfg.Policy, len(p.Allow), len(p.Deny), p.Default, p.Digest())
}

// files opens the folders that the file and sqlite sources may read.
func (d *doctor) files() finding {
	if len(d.cfg.FileRoots) == 0 {
		return good("none (RUNNER_FILE_ROOTS): the file and sqlite sources read nothing")
	}
	for _, dir := range d.cfg.FileRoots {
		if !filepath.IsAbs(dir) {
			return fail(fmt.Sprintf("RUNNER_FILE_ROOTS: %q is not an absolute path", dir), "write it from / on")
		}
		f, err := os.Open(dir)
		if err == nil {
			if _, err = f.ReadDir(1); errors.Is(err, io.EOF) {
				err = nil // empty
			}
			err = errors.Join(err, f.Close())
		}
		if err != nil {
			return fail("RUNNER_FILE_ROOTS: "+err.Error(), "make it a folder that the runner's user can read, or take it off the list")
		}
	}
	return good("%s can be read", strings.Join(d.cfg.FileRoots, ", "))
}
