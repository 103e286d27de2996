package runner

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	chain "github.com/org-runink/runbus/runner/journal"
	"github.com/org-runink/runbus/runner/policy"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// JournalDir is the folder of the journal of runners with that state folder.
func JournalDir(stateDir string) string { return filepath.Join(stateDir, "journal") }

// logPolicy says which policy is in force.
func (a *Agent) logPolicy() {
	p := a.policy.Policy()
	if p == nil {
		a.log.Info("no local policy (RUNNER_POLICY): every source is allowed, but never a cloud-metadata address")
		return
	}
	a.log.Info("local policy in force", "file", a.cfg.Policy, "digest", p.Digest(), "default", p.Default, "allow", len(p.Allow), "deny", len(p.Deny))
}

// ReloadPolicy reads the policy file anew (SIGHUP) and tells the control plane of it. A file that is not valid is logged, and the
// policy in force stays. Running fetches go on under theirs. Without a file it does nothing.
func (a *Agent) ReloadPolicy() {
	if a.cfg.Policy == "" {
		return
	}
	if err := a.policy.Reload(); err != nil {
		a.log.Error("the policy file was not taken: the policy in force stays", "error", err, "digest", a.policy.Policy().Digest())
		return
	}
	a.logPolicy()
	signal(a.rehello)
}

// openJournal decides whether a journal is kept. One that is damaged is no reason to keep none.
func (a *Agent) openJournal() error {
	if a.cfg.Journal == JournalOff {
		a.log.Warn("no journal is kept (RUNNER_JOURNAL=off)")
		return nil
	}
	dir := JournalDir(a.cfg.StateDir)
	j, err := chain.Open(dir, 0)
	if err == nil {
		a.journal = j
		head := j.Head()
		a.log.Info("every fetch is recorded in the journal", "folder", dir, "records", head.Seq, "head", head.Hash)
		a.checkJournal(dir)
		return nil
	}
	unusable := errors.Is(err, os.ErrPermission) || errors.Is(err, syscall.EROFS) || errors.Is(err, syscall.ENOTDIR)
	if a.cfg.Journal == "" && unusable {
		a.log.Warn("no journal is kept: the state folder can't be written; RUNNER_JOURNAL=on insists on one", "error", err)
		return nil
	}
	return configError("the journal can't be opened: %w: mend %s, or set RUNNER_JOURNAL=off", err, dir)
}

// checkJournal reads the records that are there, beside everything else, and warns of a break: it does not mend, and stops nothing.
func (a *Agent) checkJournal(dir string) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	a.endCheck = func() { cancel(); <-done }
	go func() {
		defer close(done)
		report, err := chain.Check(ctx, dir)
		switch {
		case ctx.Err() != nil:
		case err != nil:
			a.log.Warn("the journal was not checked", "folder", dir, "error", err)
		case !report.OK:
			a.log.Warn("the journal is not whole: somebody changed it, or the disk did; new records are written behind it",
				"folder", dir, "break", report.Break.String(), "hint", "keep a copy, and see core-runner journal verify")
		}
	}()
}

func (a *Agent) closeJournal() {
	if a.journal == nil {
		return
	}
	a.endCheck()
	head := a.journal.Head()
	if err := a.journal.Close(); err != nil {
		a.log.Error("the journal was not closed", "error", err)
	}
	a.log.Info("journal closed", "records", head.Seq, "head", head.Hash)
}

// statement is what a hello tells of policy and journal.
func (a *Agent) statement() *runbusv1.RunnerPolicy {
	s := a.policy.Statement()
	if a.journal != nil {
		head := a.journal.Head()
		s.Journal, s.JournalSeq, s.JournalHead = true, head.Seq, head.Hash
	}
	return s
}

// recorded runs the fetch under the policy in force, between two records in the journal: nothing is touched before the first is
// written, and the result is not confirmed before the second is. With credentials both are on the disk by then (as SPEC R8 has it for
// the control plane's audit), without they get there right after.
func (w *work) recorded() (response *runbusv1.RunFetchResponse, err error) {
	secrets, caller, err := w.secrets()
	defer clear(secrets)
	under := &w.lent.under
	w.agent.policy.BeginIn(under, w.task.kind)
	if w.agent.journal != nil {
		response, err = w.between(under, secrets, caller, err)
	} else if err == nil {
		response, err = w.fetch(under, secrets)
	}
	if uncounted := under.End(); uncounted != nil {
		w.log().Warn("the count of a budget may be too high", "error", uncounted)
	}
	return response, err
}

// between writes the two records, and runs the fetch in between unless it has failed already.
func (w *work) between(under *policy.Fetch, secrets map[string]string, caller *runbusv1.CallerSession, err error) (*runbusv1.RunFetchResponse, error) {
	record := chain.Record{
		Event: chain.EventStart, Dispatch: w.id, Tenant: w.agent.ref.Tenant, Runner: w.agent.ref.Runner,
		Kind: clip(w.task.kind, 64), Target: chain.Target(w.task.settings),
		Query: chain.DescribeQuery(w.task.query, under.QueryText()), Policy: under.Digest(),
	}
	if caller != nil {
		record.Caller = &chain.Caller{Tenant: caller.GetTenant(), Person: caller.GetPerson(), Role: caller.GetRole()}
	}
	if failed := w.journal(record); failed != nil {
		return nil, failed
	}
	var response *runbusv1.RunFetchResponse
	if err == nil {
		response, err = w.fetch(under, secrets)
	}
	record.Event, record.Query = chain.EventEnd, nil
	w.describeEnd(&record, under.Told())
	record.Outcome = "completed"
	if err != nil {
		err = w.reason(err)
		record.Outcome = string(schemas.CodeOf(err))
		if schemas.CodeOf(err) == schemas.CodeForbiddenHop {
			record.Reason = clip(err.Error(), 1024)
		}
	}
	if failed := w.journal(record); failed != nil && err == nil {
		return nil, failed
	}
	return response, err
}

// describeEnd fills in what the fetch did.
func (w *work) describeEnd(r *chain.Record, told policy.Told) {
	r.Rules, r.Dialled = told.Rules, told.Dialled
	if told.Refused != "" {
		r.Rules = append(r.Rules, told.Refused)
	}
	if counts := w.stream.counts; counts != nil {
		r.Rows, r.Bytes = counts.Rows(), counts.Bytes()
	}
	r.BytesOut = w.stream.total()
	r.DurationMS = time.Since(w.began).Milliseconds()
}

// journal writes one record, if a journal is kept.
func (w *work) journal(r chain.Record) error {
	if w.agent.journal == nil {
		return nil
	}
	// Not the work's context: that a work was cancelled is recorded too.
	if err := w.agent.journal.Append(context.Background(), r, w.task.credentialsFollow); err != nil {
		w.log().Error("the journal can't be written: work is refused until it can", "error", err)
		return w.agent.worded(schemas.Wrap(schemas.CodeFailed, fmt.Errorf("journal: %w", err), "the runner can't write its journal, so it runs nothing").
			WithHint("the runner's log has the cause: a full disk, perhaps; RUNNER_JOURNAL=off does without a journal"), childJournal)
	}
	return nil
}

// outlet asks the policy before bytes leave.
type outlet struct {
	stream  *chunks
	under   *policy.Fetch
	refusal error // by it
}

func (o *outlet) Write(p []byte) (int, error) {
	if o.refusal == nil {
		o.refusal = o.under.Send(len(p))
	}
	if o.refusal != nil {
		return 0, o.refusal
	}
	return o.stream.Write(p)
}

func clip(s string, most int) string {
	if len(s) > most {
		s = s[:most]
	}
	return s
}
