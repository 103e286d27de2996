package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"

	"github.com/org-runink/runbus/cp/auth"
	"github.com/org-runink/runbus/cp/dispatch"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// FetchBody is what a caller asks for.
type FetchBody struct {
	RunnerID     string            `json:"runnerId,omitempty" doc:"Id or name of the runner (SPEC D3: there is no default)" example:"edge-1"`
	ConnectionID string            `json:"connectionId,omitempty" doc:"Stored connection; not available yet: name a source"`
	Source       *SourceBody       `json:"source,omitempty"`
	Secrets      map[string]string `json:"secrets,omitempty" doc:"Credentials of this one fetch. They are sealed to the runner's key after it accepted, and never stored"`
	Query        string            `json:"query,omitempty" doc:"The read, for sources with a query language; SQL must be read-only" example:"SELECT * FROM orders"`
	MaxRows      int64             `json:"maxRows,omitempty" minimum:"0" doc:"Rows at most; 0 or more than 10,000,000 means 10,000,000"`
	MaxBytes     int64             `json:"maxBytes,omitempty" minimum:"0" doc:"Arrow bytes before compression at most; 0 or more than 4 GiB means 4 GiB"`
	Timeout      string            `json:"timeout,omitempty" doc:"Duration of the whole fetch; at most the control plane's own (10m)" example:"90s"`
}

// SourceBody names a connector and its settings.
type SourceBody struct {
	Kind     string            `json:"kind" example:"postgres" doc:"file, sqlite, postgres or http"`
	Settings map[string]string `json:"settings,omitempty"`
}

// request checks the body and makes the dispatcher's request of it.
func (b FetchBody) request(caller auth.Principal) (dispatch.Request, error) {
	if b.ConnectionID != "" {
		return dispatch.Request{}, schemas.Errorf(schemas.CodeInvalid, "stored connections are not available yet: name a source with its settings")
	}
	req := dispatch.Request{Caller: caller, Runner: b.RunnerID, Secrets: b.Secrets, Fetch: &runbusv1.RunFetchRequest{
		Query: b.Query, MaxRows: b.MaxRows, MaxBytes: b.MaxBytes,
	}}
	if b.Source != nil {
		req.Fetch.Source = &runbusv1.Source{Kind: b.Source.Kind, Settings: b.Source.Settings}
	}
	if b.Timeout != "" {
		d, err := time.ParseDuration(b.Timeout)
		if err != nil || d <= 0 {
			return dispatch.Request{}, schemas.Errorf(schemas.CodeInvalid, "timeout %q is not a duration such as 90s or 5m", b.Timeout)
		}
		req.Timeout = d
	}
	return req, nil
}

type runFetchInput struct {
	Accept string `header:"Accept" doc:"application/x-ndjson (default), application/vnd.apache.arrow.stream or text/csv"`
	Prefer string `header:"Prefer" doc:"dispatch-id: tell Runbus-Dispatch-Id at once, in an interim response 102, and not first with the status, which CSV and Arrow have with the first row. Not every HTTP client takes one; and no proxy may be in between that does not forward interim responses: one that takes them for the answer, as nginx does, breaks every fetch"`
	Body   FetchBody
}

// runFetch is POST /api/fetches.
func (s *server) runFetch(ctx context.Context, in *runFetchInput) (*huma.StreamResponse, error) {
	media, err := negotiate(in.Accept)
	if err != nil {
		return nil, err
	}
	req, err := in.Body.request(principal(ctx))
	if err != nil {
		return nil, problemOf(err)
	}
	return &huma.StreamResponse{Body: func(hctx huma.Context) {
		r, w := humago.Unwrap(hctx)
		ctx, span := s.startSpan(hctx.Context(), r)
		endSpan(span, s.streamFetch(ctx, w, media, req, r.ProtoAtLeast(1, 1) && prefers(in.Prefer, preferDispatchID)))
	}}, nil
}

// preferDispatchID is the preference (RFC 7240) for the id of the dispatch before its answer has a status: whoever is cut off before the first
// row can look up then what became of it. It is no default, since some clients take any 1xx but 100 for the answer.
const preferDispatchID = "dispatch-id"

// prefers reports whether the header Prefer has token.
func prefers(header, token string) bool {
	for part := range strings.SplitSeq(header, ",") {
		name, _, _ := strings.Cut(part, ";")
		if strings.EqualFold(strings.TrimSpace(name), token) {
			return true
		}
	}
	return false
}

// streamFetch runs the fetch and writes its answer: problem JSON if it ended before anything was written, else the stream. early has the
// id told before.
func (s *server) streamFetch(ctx context.Context, w http.ResponseWriter, media string, req dispatch.Request, early bool) dispatch.Outcome {
	id := schemas.NewULID(time.Now()) // not ulid.Make, from whose ids the next ones can be guessed
	w.Header().Set("Runbus-Dispatch-Id", id)
	run, ran := ctx, func() {}
	if early {
		run, ran = s.early.begin(ctx, req.Caller.Tenant, id)
		defer ran()
		w.WriteHeader(http.StatusProcessing)
	}
	// The caller's connection may stay open for the whole fetch, whatever the server's timeouts are.
	control := http.NewResponseController(w)
	_ = control.SetWriteDeadline(time.Time{})
	_ = control.SetReadDeadline(time.Time{})

	var out answer
	switch media {
	case mediaArrow:
		out = newRowAnswer(w, control, media, nil)
	case mediaCSV:
		out = newRowAnswer(w, control, media+"; charset=utf-8", func(w io.Writer) rowWriter { return newCSVRows(w, control.Flush) })
	default:
		out = newNDJSONAnswer(w, control)
		req.Phases = true // its last line has them
	}
	outcome := s.Dispatch.Fetch(run, req, id, out)
	ran()
	_ = control.SetWriteDeadline(time.Now().Add(lastWords))
	if err := out.finish(outcome); err != nil && ctx.Err() == nil {
		s.Log.Warn("the caller's answer could not be completed", "dispatch", id, "error", err)
	}
	return outcome
}

// lastWords is how long a caller may take for the rest of an answer once its fetch has ended, abandonAfter how long one who
// took nothing at that moment may still take.
const (
	lastWords    = time.Minute
	abandonAfter = 5 * time.Second
)

// abandon makes a write that waits for the caller fail.
func abandon(control *http.ResponseController) {
	_ = control.SetWriteDeadline(time.Now().Add(abandonAfter)) // both servers of net/http can
}

// answer is a dispatch.Sink that writes an HTTP response.
type answer interface {
	dispatch.Sink
	finish(dispatch.Outcome) error
}

// decoding turns the chunks of a result into rows on a goroutine of its own, with a pipe in between.
type decoding struct {
	pipe *io.PipeWriter
	done chan error
}

func startDecoding(w rowWriter) *decoding {
	r, pipe := io.Pipe()
	d := &decoding{pipe: pipe, done: make(chan error, 1)}
	go func() {
		err := decodeRows(r, w)
		_ = r.CloseWithError(errors.Join(err, io.ErrClosedPipe)) // later chunks fail with the cause
		d.done <- err
	}()
	return d
}

// errCut ends the stream of a fetch that did not complete.
var errCut = errors.New("the fetch did not complete")

// end waits for the last row. It returns what was wrong with the stream itself: that the fetch cut it short is not.
func (d *decoding) end(cut bool) error {
	if cut {
		_ = d.pipe.CloseWithError(errCut)
	} else {
		_ = d.pipe.Close()
	}
	err := <-d.done
	if cut && errors.Is(err, errCut) {
		return nil
	}
	return err
}

// conclude ends the decoding, if there is one. A result that can't be decoded is a failure, whatever the fetch ended with: it
// was cancelled because nobody could take the rest of it.
func (d *decoding) conclude(o *dispatch.Outcome) {
	if d == nil {
		return
	}
	if err := d.end(o.Err != nil); err != nil {
		o.Code, o.Err = dispatch.OutcomeFailed, schemas.Wrap(schemas.CodeFailed, err, err.Error())
	}
}

// ndjsonAnswer writes one JSON object a line.
type ndjsonAnswer struct {
	w      http.ResponseWriter
	lines  *lineWriter
	rows   *decoding
	opened bool
}

func newNDJSONAnswer(w http.ResponseWriter, control *http.ResponseController) *ndjsonAnswer {
	return &ndjsonAnswer{w: w, lines: &lineWriter{w: w, control: control}}
}

// Abandon ends a write under way.
func (n *ndjsonAnswer) Abandon() { abandon(n.lines.control) }

// Accepted is the first line.
func (n *ndjsonAnswer) Accepted(a dispatch.Accepted) error {
	n.opened = true
	n.w.Header().Set("Content-Type", mediaNDJSON)
	n.w.WriteHeader(http.StatusOK)
	return n.lines.writeNow(struct {
		Type string `json:"type"`
		dispatch.Accepted
	}{"accepted", a})
}

// Progress is a line of type `progress`. A time that is none, which JSON can't tell, is now.
func (n *ndjsonAnswer) Progress(u *runbusv1.RunFetchUpdate) error {
	if !n.opened {
		return nil
	}
	at := time.Now().UTC()
	if u.GetAt().IsValid() {
		at = u.GetAt().AsTime()
	}
	return n.lines.writeNow(struct {
		Type    string    `json:"type"`
		Phase   string    `json:"phase"`
		Message string    `json:"message,omitempty"`
		Rows    int64     `json:"rows"`
		Bytes   int64     `json:"bytes"`
		Done    bool      `json:"done"`
		At      time.Time `json:"at"`
	}{"progress", phaseName(u.GetPhase()), u.GetMessage(), u.GetRows(), u.GetBytes(), u.GetDone(), at})
}

// Chunk becomes rows.
func (n *ndjsonAnswer) Chunk(b []byte) error {
	if n.rows == nil {
		n.rows = startDecoding(&ndjsonRows{lines: n.lines})
	}
	_, err := n.rows.pipe.Write(b)
	return err
}

// errorLine is the last line of a fetch that did not complete.
type errorLine struct {
	Type       string             `json:"type"`
	DispatchID string             `json:"dispatchId"`
	Outcome    string             `json:"outcome"`
	Code       schemas.Code       `json:"code"`
	Message    string             `json:"message"`
	Hint       string             `json:"hint,omitempty"`
	Phases     []dispatch.PhaseAt `json:"phases"`
}

// resultLine is the last line of a fetch that completed.
type resultLine struct {
	Type       string             `json:"type"`
	DispatchID string             `json:"dispatchId"`
	Outcome    string             `json:"outcome"`
	RunnerID   string             `json:"runnerId"`
	RunnerPID  int64              `json:"runnerPid"`
	Rows       int64              `json:"rows"`
	Bytes      int64              `json:"bytes"`
	WireBytes  int64              `json:"wireBytes"`
	ElapsedMs  int64              `json:"elapsedMs"`
	Phases     []dispatch.PhaseAt `json:"phases"`
}

type noticeLine struct {
	Type    string `json:"type"`
	Code    string `json:"code"`
	Message string `json:"message"`
}

func (n *ndjsonAnswer) finish(o dispatch.Outcome) error {
	if !n.opened {
		return writeProblem(n.w, problemOfOutcome(o))
	}
	n.rows.conclude(&o)
	for _, notice := range o.Notices {
		if err := n.lines.write(noticeLine{"notice", noticeName(notice.GetCode()), notice.GetMessage()}); err != nil {
			return err
		}
	}
	if o.Err != nil {
		return n.lines.writeNow(errorLine{"error", o.DispatchID, o.Code, o.Err.Code, o.Err.Message, o.Err.Hint, o.Phases})
	}
	r := o.Response
	return n.lines.writeNow(resultLine{
		"result", o.DispatchID, o.Code, o.RunnerID, r.GetRunnerPid(), r.GetRows(), r.GetBytes(), r.GetWireBytes(),
		r.GetElapsed().AsDuration().Milliseconds(), o.Phases,
	})
}

// rowAnswer writes rows alone, as Arrow or CSV; the outcome is in the trailers. Nothing is written before the first chunk, so
// that a fetch that fails before it gets a status of its own.
type rowAnswer struct {
	w       http.ResponseWriter
	control *http.ResponseController
	media   string
	format  func(io.Writer) rowWriter // nil: the chunks as they are
	rows    *decoding
	opened  bool
}

func newRowAnswer(w http.ResponseWriter, control *http.ResponseController, media string, format func(io.Writer) rowWriter) *rowAnswer {
	return &rowAnswer{w: w, control: control, media: media, format: format}
}

// Abandon ends a write under way.
func (r *rowAnswer) Abandon() { abandon(r.control) }

// Accepted writes nothing yet.
func (r *rowAnswer) Accepted(dispatch.Accepted) error { return nil }

// Progress has no place in a stream of rows.
func (r *rowAnswer) Progress(*runbusv1.RunFetchUpdate) error { return nil }

// Chunk opens the answer with the first.
func (r *rowAnswer) Chunk(b []byte) error {
	r.open()
	if r.rows != nil {
		_, err := r.rows.pipe.Write(b)
		return err
	}
	if _, err := r.w.Write(b); err != nil {
		return err
	}
	return r.control.Flush()
}

func (r *rowAnswer) open() {
	if r.opened {
		return
	}
	r.opened = true
	h := r.w.Header()
	h.Set("Content-Type", r.media)
	h.Set("Trailer", "Runbus-Outcome, Runbus-Error, Runbus-Notices")
	r.w.WriteHeader(http.StatusOK)
	if r.format != nil {
		r.rows = startDecoding(r.format(r.w))
	}
}

func (r *rowAnswer) finish(o dispatch.Outcome) error {
	if !r.opened && o.Err != nil {
		return writeProblem(r.w, problemOfOutcome(o))
	}
	r.open()
	r.rows.conclude(&o)
	h := r.w.Header()
	h.Set("Runbus-Outcome", o.Code)
	if len(o.Notices) > 0 {
		text, err := noticesTrailer(o.Notices)
		if err != nil {
			return err
		}
		h.Set("Runbus-Notices", text)
	}
	if o.Err == nil {
		return nil
	}
	text, err := errorTrailer(o.Err)
	if err != nil {
		return err
	}
	h.Set("Runbus-Error", text)
	return nil
}

// maxTrailer bounds each trailer in bytes: Go's HTTP client fails a response with more than 4 KiB of trailers in all.
const maxTrailer = 1536

// mostNoticed is more notices than fit into a trailer: each takes more than its type.
const mostNoticed = maxTrailer / len(`{"type":"notice"},`)

// noticesTrailer has as many notices as fit, the last of them telling how many more there are. A runner may send more than there is time to
// try with.
func noticesTrailer(notices []*runbusv1.Notice) (string, error) {
	lines := make([]noticeLine, min(len(notices), mostNoticed))
	for i := range lines {
		lines[i] = noticeLine{"notice", noticeName(notices[i].GetCode()), notices[i].GetMessage()}
	}
	for kept := len(lines); ; kept-- {
		shown := slices.Clone(lines[:kept])
		if more := len(notices) - kept; more > 0 {
			shown = append(shown, noticeLine{"notice", noticeName(runbusv1.NoticeCode_NOTICE_CODE_SOURCE),
				fmt.Sprintf("%d more notices are left out here; application/x-ndjson has them all", more)})
		}
		text, err := trailerJSON(shown)
		if err != nil || len(text) <= maxTrailer || kept == 0 {
			return text, err
		}
	}
}

// errorTrailer has the error, its message shortened until it fits.
func errorTrailer(e *schemas.Error) (string, error) {
	for most := max(len(e.Message), len(e.Hint)); ; most /= 2 {
		text, err := trailerJSON(struct {
			Code    schemas.Code `json:"code"`
			Message string       `json:"message"`
			Hint    string       `json:"hint,omitempty"`
		}{e.Code, shortened(e.Message, most), shortened(e.Hint, most)})
		if err != nil || len(text) <= maxTrailer || most == 0 {
			return text, err
		}
	}
}

func shortened(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

func trailerJSON(v any) (string, error) {
	b, err := json.Marshal(v)
	return asciiJSON(b), err
}

// asciiJSON writes what is not ASCII as \u escapes: a trailer can hold nothing else.
func asciiJSON(b []byte) string {
	var out strings.Builder
	for _, r := range string(b) {
		if r < utf8.RuneSelf {
			out.WriteRune(r)
			continue
		}
		for _, u := range utf16.AppendRune(nil, r) {
			fmt.Fprintf(&out, `\u%04x`, u)
		}
	}
	return out.String()
}

// lineWriter writes whole lines from two goroutines: the relay's and the decoder's.
type lineWriter struct {
	w       io.Writer
	control *http.ResponseController
	mu      sync.Mutex
}

func (l *lineWriter) write(v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return l.raw(append(b, '\n'))
}

func (l *lineWriter) raw(line []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, err := l.w.Write(line)
	return err
}

func (l *lineWriter) flush() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.control.Flush()
}

func (l *lineWriter) writeNow(v any) error {
	if err := l.write(v); err != nil {
		return err
	}
	return l.flush()
}
