package sourcetest

import (
	"context"
	"errors"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Exercise runs the suite.
func Exercise(t *testing.T, c source.Connector, f Fixture) {
	t.Helper()
	if len(f.Cases) == 0 || f.ManyRows < MinManyRows || f.BrokenText == "" {
		t.Fatal("the fixture is not complete")
	}
	suite := []struct {
		name string
		run  func(*testing.T, source.Connector, *Fixture)
	}{
		{"values", values}, {"no rows", noRows}, {"row limit", rowLimit}, {"byte limit", byteLimit},
		{"settings", settings}, {"errors", broken}, {"dialling", dialling}, {"read only", readOnly},
		{"cancel", cancel}, {"delivery", delivery}, {"concurrency", concurrency},
	}
	for _, test := range suite {
		t.Run(test.name, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			test.run(t, c, &f)
			f.idle(t)
			if err := leak.Find(before); err != nil {
				t.Error(err)
			}
		})
	}
}

// idle fails the test if the source has something of ours left.
func (f *Fixture) idle(t *testing.T) {
	t.Helper()
	if f.Idle == nil {
		return
	}
	ctx, stop := context.WithTimeout(context.Background(), patience)
	defer stop()
	if err := f.Idle(ctx); err != nil {
		t.Errorf("something is left at the source: %v", err)
	}
}

// values: each case gives exactly its schema, rows and notices.
func values(t *testing.T, c source.Connector, f *Fixture) {
	for _, want := range f.Cases {
		t.Run(want.Name, func(t *testing.T) {
			r := f.fetch()
			schema, rows := r.result(t, c, want.Request)
			compare(t, "schema", schema, want.Schema)
			compare(t, "rows", rows, want.Rows)
			notices := r.out.Notices()
			if len(notices) != len(want.Notices) {
				t.Fatalf("notices %v, want %q", notices, want.Notices)
			}
			for i, part := range want.Notices {
				if !strings.Contains(notices[i].GetMessage(), part) {
					t.Errorf("notice %q, want %q", notices[i].GetMessage(), part)
				}
			}
			if len(rows) > 0 && !slices.Contains(r.phases, runbusv1.Phase_PHASE_STREAMING) {
				t.Errorf("phases %v", r.phases)
			}
		})
	}
}

func compare(t *testing.T, what string, got, want []string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s\n got %s\nwant %s", what, strings.Join(got, "\n     "), strings.Join(want, "\n     "))
	}
}

// noRows: a result without rows has its schema all the same.
func noRows(t *testing.T, c source.Connector, f *Fixture) {
	schema, rows := f.fetch().result(t, c, f.Empty.Request)
	compare(t, "schema", schema, f.Empty.Schema)
	compare(t, "rows", rows, nil)
}

// rowLimit: a result is cut at exactly the limit, with a notice, and not a row earlier.
func rowLimit(t *testing.T, c source.Connector, f *Fixture) {
	var first []string
	for _, most := range []int64{f.ManyRows, 1, source.BatchRows, source.BatchRows + 1, f.ManyRows - 1, f.ManyRows + 1} {
		r := f.fetch()
		r.limits.MaxRows = most
		_, rows := r.result(t, c, f.Many)
		if first == nil {
			first = rows
		}
		cut := most < f.ManyRows
		if want := min(most, f.ManyRows); int64(len(rows)) != want || !slices.Equal(rows, first[:min(want, int64(len(first)))]) {
			t.Errorf("at most %d of %d rows: got %d, or others", most, f.ManyRows, len(rows))
		}
		notices(t, r, cut, runbusv1.NoticeCode_NOTICE_CODE_ROW_LIMIT)
	}
}

// byteLimit: a result stays below the limit, comes as near to it as a row allows, and has the notice.
func byteLimit(t *testing.T, c source.Connector, f *Fixture) {
	whole := f.fetch()
	whole.result(t, c, f.Many)
	notices(t, whole, false, runbusv1.NoticeCode_NOTICE_CODE_BYTE_LIMIT)
	all := whole.out.Bytes()
	for _, most := range []int64{all, all - 1, all / 2, 1} {
		r := f.fetch()
		r.limits.MaxBytes = most
		_, rows := r.result(t, c, f.Many)
		cut := most < all
		if r.out.Bytes() > most || cut == (int64(len(rows)) == f.ManyRows) {
			t.Errorf("at most %d of %d bytes: got %d, %d rows", most, all, r.out.Bytes(), len(rows))
		}
		if most == all/2 && r.out.Bytes() < most*9/10 {
			t.Errorf("at most %d bytes: only %d", most, r.out.Bytes())
		}
		notices(t, r, cut, runbusv1.NoticeCode_NOTICE_CODE_BYTE_LIMIT)
	}
}

func notices(t *testing.T, r *fetch, cut bool, code runbusv1.NoticeCode) {
	t.Helper()
	has := slices.ContainsFunc(r.out.Notices(), func(n *runbusv1.Notice) bool { return n.GetCode() == code })
	if has != cut {
		t.Errorf("limits %+v: notices %v", r.limits, r.out.Notices())
	}
}

// settings: what is wrong with a request is refused before anything is touched, with the name of what is wrong.
func settings(t *testing.T, c source.Connector, f *Fixture) {
	good := f.Cases[0].Request
	unseen(t, c, f, "unknown setting", changed(good, "no-such-setting", "x", "", ""), schemas.CodeBadSource, "no-such-setting")
	unseen(t, c, f, "unknown secret", changed(good, "", "", "no-such-secret", "hunter2-hunter2"), schemas.CodeBadSource, "no-such-secret")
	unseen(t, c, f, "no settings", source.Request{Query: good.Query, Secrets: good.Secrets}, schemas.CodeBadSource, "")
}

// changed is req with one more setting or secret.
func changed(req source.Request, setting, value, secretName, secret string) source.Request {
	req.Settings, req.Secrets = maps.Clone(req.Settings), maps.Clone(req.Secrets)
	if setting != "" {
		if req.Settings == nil {
			req.Settings = map[string]string{}
		}
		req.Settings[setting] = value
	}
	if secretName != "" {
		if req.Secrets == nil {
			req.Secrets = map[string]string{}
		}
		req.Secrets[secretName] = secret
	}
	return req
}

// unseen fetches without roots and with a dial hook that only counts: the refusal must come before either matters.
func unseen(t *testing.T, c source.Connector, f *Fixture, what string, req source.Request, code schemas.Code, text string) {
	t.Helper()
	r := f.fetch()
	r.env.Roots = nil
	r.net.dial = func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("must not dial") }
	err := r.run(t.Context(), t, c, req)
	if schemas.CodeOf(err) != code || !strings.Contains(err.Error(), text) {
		t.Errorf("%s: %v (%s), want %s %q", what, err, schemas.CodeOf(err), code, text)
	}
	if n := r.net.dialed.Load(); n != 0 || r.stream.Len() != 0 {
		t.Errorf("%s: %d dials, %d bytes of result before the refusal", what, n, r.stream.Len())
	}
}

// broken: the source's own words come through, with the code for it. (run checks for the secrets.)
func broken(t *testing.T, c source.Connector, f *Fixture) {
	r := f.fetch()
	err := r.run(t.Context(), t, c, f.Broken)
	if schemas.CodeOf(err) != schemas.CodeSource || !strings.Contains(err.Error(), f.BrokenText) {
		t.Errorf("%v (%s), want %q", err, schemas.CodeOf(err), f.BrokenText)
	}
}

// dialling: every connection goes through the hook, so that there is none without it, and metadata addresses are refused.
func dialling(t *testing.T, c source.Connector, f *Fixture) {
	r := f.fetch()
	r.result(t, c, f.Cases[0].Request)
	if f.Dials == nil {
		if n := r.net.dialed.Load(); n != 0 {
			t.Errorf("a kind that does not dial has dialled %d times", n)
		}
		return
	}
	if r.net.dialed.Load() == 0 {
		t.Error("the read did not go through the dial hook")
	}
	r = f.fetch()
	refusal := schemas.Errorf(schemas.CodeForbiddenHop, "this hook lets nothing through")
	r.net.dial = func(context.Context, string, string) (net.Conn, error) { return nil, refusal }
	if err := r.run(t.Context(), t, c, f.Cases[0].Request); !errors.Is(err, refusal) {
		t.Errorf("with a hook that refuses: %v", err)
	}
	r = f.fetch()
	r.env.Dial = nil
	if err := r.run(t.Context(), t, c, f.Cases[0].Request); err == nil {
		t.Error("reads without a dial hook")
	}
	for _, host := range []string{"169.254.169.254", "::ffff:169.254.169.254", "fd00:ec2::254", "100.100.100.200", "metadata.google.internal"} {
		r := f.fetch()
		if err := r.run(t.Context(), t, c, f.Dials(host)); schemas.CodeOf(err) != schemas.CodeForbiddenHop {
			t.Errorf("%s: %v (%s)", host, err, schemas.CodeOf(err))
		}
	}
}

// readOnly: what is not a read by its text is refused unseen; what passes as one is stopped by the source.
func readOnly(t *testing.T, c source.Connector, f *Fixture) {
	if f.SQL {
		for _, query := range []string{
			"", "DELETE FROM t", "SELECT 1; DELETE FROM t", "/* SELECT */ DROP TABLE t", "WITH x AS (SELECT 1) DELETE FROM t", "ATTACH 'x' AS y", "PRAGMA query_only=0",
			"COPY t TO '/x'", "BEGIN", "SET x = 1", "VALUES (1)",
		} {
			req := f.Cases[0].Request
			req.Query = query
			unseen(t, c, f, query, req, schemas.CodeReadOnly, "")
		}
	}
	for _, req := range f.Writes {
		r := f.fetch()
		if err := r.run(t.Context(), t, c, req); err == nil {
			t.Errorf("%s: no error", req.Query)
		}
	}
	if f.Unchanged != nil {
		f.Unchanged(t)
	}
}

// StopWithin is how long a connector may take to stop after a cancel. SPEC D12 says a second: RUNBUS_LONG holds it to that, on a
// machine that does nothing else; a busy one gets more.
func StopWithin() time.Duration {
	if os.Getenv("RUNBUS_LONG") != "" {
		return time.Second
	}
	return patience
}

// cancel: the end of the context ends the read soon, with an error, wherever it stands.
func cancel(t *testing.T, c source.Connector, f *Fixture) {
	t.Run("before", func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		stop()
		if err := f.fetch().run(ctx, t, c, f.Many); err == nil {
			t.Error("no error")
		}
	})
	t.Run("while it streams", func(t *testing.T) {
		ctx := newStopper(t)
		r := f.fetch()
		r.writer = &blockedWriter{ctx: ctx, reached: sync.OnceFunc(func() { go ctx.stop() })}
		ctx.check(t, r.run(ctx, t, c, f.Many))
	})
	if f.Long == nil {
		return
	}
	t.Run("while it queries", func(t *testing.T) {
		ctx := newStopper(t)
		r := f.fetch()
		running := make(chan error, 1)
		watch := sync.OnceFunc(func() {
			go func() {
				defer ctx.stop()
				if f.Running == nil {
					running <- nil
				} else {
					running <- f.Running(ctx)
				}
			}()
		})
		r.phase = func(p runbusv1.Phase) {
			if p == runbusv1.Phase_PHASE_QUERYING {
				watch()
			}
		}
		ctx.check(t, r.run(ctx, t, c, *f.Long))
		watch() // if it never came to that: let the check of running fail, not hang
		if err := <-running; err != nil {
			t.Errorf("the read never ran: %v", err)
		}
	})
}

// stopper cancels a context and remembers when.
type stopper struct {
	context.Context //nolint:containedctx // it is one
	cancel          context.CancelFunc
	at              atomic.Pointer[time.Time]
}

func newStopper(t *testing.T) *stopper {
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	return &stopper{Context: ctx, cancel: cancel}
}

func (s *stopper) stop() {
	now := time.Now()
	s.at.CompareAndSwap(nil, &now)
	s.cancel()
}

// check looks at how a fetch ended that stop was to end.
func (s *stopper) check(t *testing.T, err error) {
	t.Helper()
	at := s.at.Load()
	switch {
	case err == nil || at == nil:
		t.Errorf("the fetch ended by itself: %v", err)
	case time.Since(*at) > StopWithin():
		t.Errorf("the fetch took %s to stop", time.Since(*at))
	}
}

// blockedWriter takes the schema and then blocks as a caller does that has stopped reading.
type blockedWriter struct {
	ctx     context.Context //nolint:containedctx // an io.Writer has no other way to be released
	reached func()
}

func (w *blockedWriter) Write([]byte) (int, error) {
	w.reached()
	<-w.ctx.Done()
	return 0, w.ctx.Err()
}

var errGone = errors.New("the caller has gone")

type goneWriter struct{}

func (goneWriter) Write([]byte) (int, error) { return 0, errGone }

// delivery: a result that can't be delivered ends the read with an error.
func delivery(t *testing.T, c source.Connector, f *Fixture) {
	r := f.fetch()
	r.writer = goneWriter{}
	if err := r.run(t.Context(), t, c, f.Many); err == nil || !errors.Is(r.out.Close(), errGone) {
		t.Errorf("%v, want %v", err, errGone)
	}
}

// concurrency: fetches of one connector don't meet.
func concurrency(t *testing.T, c source.Connector, f *Fixture) {
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			r := f.fetch()
			if err := r.run(t.Context(), t, c, f.Cases[0].Request); err != nil {
				t.Errorf("fetch: %v", err)
				return
			}
			if err := r.out.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
			if want := int64(len(f.Cases[0].Rows)); r.out.Rows() != want {
				t.Errorf("%d rows, want %d", r.out.Rows(), want)
			}
		})
	}
	group.Wait()
}
