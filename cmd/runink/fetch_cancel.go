package main

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/schemas"
)

const (
	// cancelWait is how long a fetch that is being cancelled may take to say how it ended.
	cancelWait = 15 * time.Second
	// answerWait is how long the control plane may take to answer the cancel before this side cancels by closing as well.
	answerWait = 500 * time.Millisecond
	// An outcome may be on its way when nobody took the cancel: this side hangs up after so many steps of such a length. It runs in each of
	// them, so that what came while everything stood still is read.
	lingerSteps = 5
	lingerStep  = 100 * time.Millisecond
)

// giveUp has the fetch cancelled (SPEC D12). It returns when call has ended, which the outcome does, or else when the caller is to hang up.
//
// The server is asked to cancel the dispatch by its id. Where that is not taken, the dispatch may run all the same: at another replica than
// the one that was asked, or it is not known there yet. So this side ends its half of the connection, which cancels too, and may hear the
// outcome still; a proxy that does not pass that on does pass on that this side hangs up.
func (f *fetch) giveUp(call context.Context, asked *exchange) {
	id := asked.dispatch()
	if id == "" { // a closed connection cancels, and there is hardly anything to hear
		asked.givenUp.Store(true)
		return
	}
	wait, cancel := context.WithTimeout(call, cancelWait)
	defer cancel()
	late := time.AfterFunc(answerWait, asked.endSending)
	err := f.api.call(wait, http.MethodDelete, "/api/fetches/"+url.PathEscape(id), nil, nil)
	if late.Stop(); err == nil {
		<-wait.Done() // the outcome comes meanwhile, and ends call
		return
	}
	asked.endSending()
	for range lingerSteps {
		select {
		case <-wait.Done():
			return
		case <-time.After(lingerStep):
		}
	}
}

// cancelled is the error of a fetch that this side gave up. A dispatch that is known by its id may still run, or have ended well.
func cancelled(dispatch string) error {
	if dispatch == "" {
		return cancelledEarly("")
	}
	return process.WithDispatch(schemas.Errorf(schemas.CodeOutcomeUnknown, "outcome unknown: cancelled before the control plane told it").
		WithHint(traceHint(dispatch)), dispatch)
}

// cancelledEarly is the error of a fetch that this side gave up before it knew of a dispatch, whose id may have come since.
func cancelledEarly(dispatch string) error {
	err := schemas.Errorf(schemas.CodeCancelled, "cancelled before the outcome was known")
	if dispatch != "" {
		err = err.WithHint(traceHint(dispatch))
	}
	return err
}

func traceHint(dispatch string) string {
	return "`runink fetch trace " + dispatch + "` shows what became of it"
}

// untold reports whether err, of a fetch, is that its outcome did not come; not that the server told it as unknown.
func untold(err error) bool {
	var told *exitError
	return schemas.CodeOf(err) == schemas.CodeOutcomeUnknown && !errors.As(err, &told)
}

// exchange is how far a request got.
type exchange struct {
	sent, answered atomic.Bool
	givenUp        atomic.Bool              // this side hung up before the id was known
	shut           atomic.Bool              // this side sends no more on the connection, which cancels as well
	id             atomic.Pointer[string]   // of the dispatch, told in an interim response or with the answer
	conn           atomic.Pointer[net.Conn] // that the request is on
}

// dispatch is the id of the dispatch, "" if it was not told yet.
func (e *exchange) dispatch() string {
	if id := e.id.Load(); id != nil {
		return *id
	}
	return ""
}

func (e *exchange) told(id string) {
	if id != "" {
		e.id.Store(&id)
	}
}

func (e *exchange) watch(ctx context.Context) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn:              func(c httptrace.GotConnInfo) { e.conn.Store(&c.Conn) },
		WroteHeaders:         func() { e.sent.Store(true) },
		GotFirstResponseByte: func() { e.answered.Store(true) }, // an interim response too
		Got1xxResponse: func(_ int, h textproto.MIMEHeader) error {
			e.told(h.Get("Runbus-Dispatch-Id"))
			return nil
		},
	})
}

// unanswered reports whether the server may have read the request that failed with err, and told nothing that can be read.
func (e *exchange) unanswered(err error) bool {
	var said *schemas.Error
	lost := !errors.As(err, &said) || said.Cause != nil // see send
	return e.sent.Load() && (!e.answered.Load() || errors.Is(err, io.ErrUnexpectedEOF) || lost && e.dispatch() != "")
}

// endSending ends this side's half of the connection, if the request is on one: the server sees that the caller goes, and may still answer.
func (e *exchange) endSending() {
	conn := e.conn.Load()
	if conn == nil {
		return
	}
	if half, can := (*conn).(interface{ CloseWrite() error }); can { // TCP, TLS
		e.shut.Store(true)
		_ = half.CloseWrite() // where it fails the connection is gone
	}
}
