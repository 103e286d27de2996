package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/schemas"
)

// fetchBody is the request of POST /api/fetches.
type fetchBody struct {
	RunnerID string            `json:"runnerId,omitempty"`
	Source   *sourceBody       `json:"source,omitempty"`
	Secrets  map[string]string `json:"secrets,omitempty"`
	Query    string            `json:"query,omitempty"`
	MaxRows  int64             `json:"maxRows,omitempty"`
	MaxBytes int64             `json:"maxBytes,omitempty"`
	Timeout  string            `json:"timeout,omitempty"`
}

type sourceBody struct {
	Kind     string            `json:"kind"`
	Settings map[string]string `json:"settings,omitempty"`
}

// The lines of a result in NDJSON.
type (
	acceptedLine struct {
		DispatchID string    `json:"dispatchId"`
		TenantID   string    `json:"tenantId"`
		RunnerID   string    `json:"runnerId"`
		RunnerPID  int64     `json:"runnerPid"`
		At         time.Time `json:"at"`
	}
	progressLine struct {
		Phase   string `json:"phase"`
		Message string `json:"message"`
		Rows    int64  `json:"rows"`
		Bytes   int64  `json:"bytes"`
	}
	column struct {
		Name string `json:"name"`
		Type string `json:"type"`
	}
	noticeLine struct {
		Code    string `json:"code"`
		Message string `json:"message"`
	}
	resultLine struct {
		DispatchID string       `json:"dispatchId"`
		Outcome    string       `json:"outcome"`
		RunnerID   string       `json:"runnerId"`
		RunnerPID  int64        `json:"runnerPid"`
		Rows       int64        `json:"rows"`
		Bytes      int64        `json:"bytes"`
		WireBytes  int64        `json:"wireBytes"`
		ElapsedMs  int64        `json:"elapsedMs"`
		Phases     []phaseLine  `json:"phases"`
		Notices    []noticeLine `json:"notices,omitempty"`
	}
	errorLine struct {
		DispatchID string       `json:"dispatchId"`
		Outcome    string       `json:"outcome"`
		Code       schemas.Code `json:"code"`
		Message    string       `json:"message"`
		Hint       string       `json:"hint"`
	}
)

// rowSink takes the rows of a result one by one. A row is a JSON object whose keys are in the order of the columns.
type rowSink interface {
	columns([]column) error
	row(json.RawMessage) error
	end() error
}

// progressSink shows where a fetch stands.
type progressSink interface {
	accepted(acceptedLine)
	progress(progressLine)
	stop()
}

// fetch is one call of POST /api/fetches.
type fetch struct {
	api      *client
	body     fetchBody
	earlyID  bool // ask for the id of the dispatch in an interim response, ahead of the answer
	rows     rowSink
	progress progressSink
	accepted acceptedLine
	notices  []noticeLine
}

// stream runs the fetch and hands its lines to the sinks. When ctx ends it has the server cancel, and waits for the outcome: see giveUp.
func (f *fetch) stream(ctx context.Context) (resultLine, error) {
	return f.run(ctx, "application/x-ndjson", func(resp *http.Response) (resultLine, error) { return f.read(resp.Body) })
}

// copyRaw runs the fetch in a format of rows alone (Arrow, CSV) and copies it to w. The outcome is in the trailers. When ctx ends it
// does as stream.
func (f *fetch) copyRaw(ctx context.Context, accept string, w io.Writer) (resultLine, error) {
	return f.run(ctx, accept, func(resp *http.Response) (resultLine, error) { return f.copy(resp, w) })
}

func (f *fetch) run(ctx context.Context, accept string, take func(*http.Response) (resultLine, error)) (resultLine, error) {
	defer f.progress.stop()
	// The request outlives ctx: after Ctrl-C the outcome still comes on it.
	call, hangUp := context.WithCancel(context.WithoutCancel(ctx))
	defer hangUp()
	var asked exchange
	release := context.AfterFunc(ctx, func() {
		f.giveUp(call, &asked)
		hangUp()
	})
	defer release()

	prefer := ""
	if f.earlyID {
		prefer = "dispatch-id"
	}
	resp, err := f.api.send(asked.watch(call), http.MethodPost, "/api/fetches", f.body, accept, prefer)
	switch id := asked.dispatch(); {
	case err == nil:
	case ctx.Err() != nil && id == "" || (call.Err() != nil || asked.shut.Load()) && asked.unanswered(err):
		return resultLine{}, cancelled(id)
	case asked.unanswered(err):
		if cause := errors.Unwrap(err); cause != nil {
			err = cause
		}
		return resultLine{}, process.WithDispatch(cut(err, id), id)
	default:
		return resultLine{}, err
	}
	defer resp.Body.Close()
	id := resp.Header.Get("Runbus-Dispatch-Id")
	asked.told(id)
	result, err := take(resp)
	if err != nil && (call.Err() != nil || asked.shut.Load()) && untold(err) {
		err = cancelled(id)       // this side hung up
		if asked.givenUp.Load() { // before the answer came, which had begun by then
			err = cancelledEarly(id)
		}
	}
	return result, process.WithDispatch(err, cmp.Or(id, f.accepted.DispatchID, result.DispatchID))
}

// cut is the error of a connection that ended before the outcome of the dispatch came; "" if its id had not come either.
func cut(cause error, dispatch string) error {
	where := "`runink fetch list` shows whether it began"
	if dispatch != "" {
		where = traceHint(dispatch)
	}
	return schemas.Wrap(schemas.CodeOutcomeUnknown, cause, "outcome unknown: the connection to the control plane was cut before the outcome came").
		WithHint("the fetch may have been run, and is not run again by itself; " + where)
}

// read takes the lines until the last one.
func (f *fetch) read(body io.Reader) (resultLine, error) {
	lines := bufio.NewReaderSize(body, 64<<10)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil { // a line without an end is not whole
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return resultLine{}, cut(err, f.accepted.DispatchID)
		}
		var head struct {
			Type string          `json:"type"`
			Row  json.RawMessage `json:"row"`
		}
		if err := json.Unmarshal(line, &head); err != nil {
			return resultLine{}, schemas.Wrap(schemas.CodeOutcomeUnknown, err, "outcome unknown: a line of the result is damaged")
		}
		done, result, err := f.take(head.Type, head.Row, line)
		if done || err != nil {
			return result, err
		}
	}
}

// take handles one line; done tells that it was the last.
func (f *fetch) take(kind string, row json.RawMessage, line []byte) (done bool, result resultLine, err error) {
	switch kind {
	case "accepted":
		if err := json.Unmarshal(line, &f.accepted); err != nil {
			return true, result, err
		}
		f.progress.accepted(f.accepted)
	case "progress":
		var p progressLine
		if err := json.Unmarshal(line, &p); err != nil {
			return true, result, err
		}
		f.progress.progress(p)
	case "schema":
		var s struct {
			Columns []column `json:"columns"`
		}
		if err := json.Unmarshal(line, &s); err != nil {
			return true, result, err
		}
		return false, result, f.rows.columns(s.Columns)
	case "row":
		return false, result, f.rows.row(row)
	case "notice":
		var n noticeLine
		if err := json.Unmarshal(line, &n); err != nil {
			return true, result, err
		}
		f.notices = append(f.notices, n)
	case "result":
		if err := json.Unmarshal(line, &result); err != nil {
			return true, result, err
		}
		result.Notices = f.notices
		return true, result, f.rows.end()
	case "error":
		var e errorLine
		if err := json.Unmarshal(line, &e); err != nil {
			return true, result, err
		}
		return true, resultLine{DispatchID: e.DispatchID, Outcome: e.Outcome}, outcomeError(e.Outcome, &schemas.Error{Code: e.Code, Message: e.Message, Hint: e.Hint})
	}
	return false, result, nil // a type of a later version
}

// outcomeError gives the error of an ended fetch the exit status of its outcome: what was refused is 3, whatever its code.
func outcomeError(outcome string, err *schemas.Error) error {
	switch outcome {
	case "refused":
		return &exitError{3, err}
	case "outcome_unknown":
		return &exitError{4, err}
	case "failed", "cancelled", "deadline", "runner_lost":
		return &exitError{1, err}
	}
	return err
}

// copy takes the rows, and the outcome from the trailers. No trailer: the outcome is unknown.
func (f *fetch) copy(resp *http.Response, w io.Writer) (resultLine, error) {
	id := resp.Header.Get("Runbus-Dispatch-Id")
	f.progress.accepted(acceptedLine{DispatchID: id})
	from := &counted{r: resp.Body, tell: func(n int64) { f.progress.progress(progressLine{Phase: "streaming", Bytes: n}) }}
	n, err := io.Copy(w, from)
	result := resultLine{DispatchID: id, Outcome: resp.Trailer.Get("Runbus-Outcome"), WireBytes: n}
	switch {
	case from.err != nil:
		return result, cut(from.err, id)
	case err != nil:
		return result, fmt.Errorf("write the result: %w", err)
	}
	if notices := resp.Trailer.Get("Runbus-Notices"); notices != "" {
		if err := json.Unmarshal([]byte(notices), &result.Notices); err != nil {
			return result, fmt.Errorf("the notices are damaged: %w", err)
		}
	}
	if result.Outcome == "completed" {
		return result, nil
	}
	var e errorLine
	if err := json.Unmarshal([]byte(resp.Trailer.Get("Runbus-Error")), &e); err != nil {
		return result, cut(err, id)
	}
	return result, outcomeError(result.Outcome, &schemas.Error{Code: e.Code, Message: e.Message, Hint: e.Hint})
}

// counted tells how many bytes were read, and keeps the error that ended it before the end.
type counted struct {
	r    io.Reader
	n    int64
	err  error
	tell func(int64)
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	c.tell(c.n)
	if err != nil && !errors.Is(err, io.EOF) {
		c.err = err
	}
	return n, err
}
