package bus

import (
	"maps"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
)

// The headers of the W3C trace context, as they stand on messages that belong to a traced dispatch: its work, its credentials,
// and what the runner answers on `ctl`.
const (
	HeaderTraceparent = "traceparent"
	HeaderTracestate  = "tracestate"
)

// maxTrace bounds each of both headers in bytes: the envelope has room for them (W3C asks for 512 of a tracestate).
const maxTrace = 512

// Trace is a W3C trace context as it stands in headers; the zero value means none. It is only carried here: whether it is
// well-formed is judged by whoever makes a span of it.
type Trace struct{ Parent, State string }

// TraceOf is the trace context of a message, none if its headers are longer than they may be.
func TraceOf(msg *nats.Msg) Trace {
	t := Trace{Parent: msg.Header.Get(HeaderTraceparent), State: msg.Header.Get(HeaderTracestate)}
	return t.clamped()
}

// clamped drops what is too long.
func (t Trace) clamped() Trace {
	if t.Parent == "" || len(t.Parent) > maxTrace {
		return Trace{}
	}
	if len(t.State) > maxTrace {
		t.State = ""
	}
	return t
}

// put writes t into the headers of msg.
func (t Trace) put(msg *nats.Msg) {
	t = t.clamped()
	if t.Parent == "" {
		return
	}
	msg.Header[HeaderTraceparent] = []string{t.Parent}
	if t.State != "" {
		msg.Header[HeaderTracestate] = []string{t.State}
	}
}

// onAnswer is msg of a result stream with t in its headers; msg itself, whose headers are shared, where none belongs on it.
func (t Trace) onAnswer(msg *nats.Msg) *nats.Msg {
	if t.Parent == "" {
		return msg
	}
	switch TypeOf(msg) {
	case "RunnerWorkChunk", "RunnerWorkProgress":
		return msg
	}
	return t.on(msg)
}

// on is msg, whose headers are shared, with t in headers of its own; msg itself if there is no trace.
func (t Trace) on(msg *nats.Msg) *nats.Msg {
	if t.Parent == "" {
		return msg
	}
	traced := &nats.Msg{Subject: msg.Subject, Reply: msg.Reply, Data: msg.Data, Header: make(nats.Header, len(msg.Header)+2)}
	maps.Copy(traced.Header, msg.Header)
	t.put(traced)
	return traced
}

// PublishTraced is PublishWithReply with a trace context.
func (c *Conn) PublishTraced(t Trace, subject, reply string, m proto.Message) error {
	msg, err := NewMsg(subject, m)
	if err != nil {
		return err
	}
	msg.Reply = reply
	t.put(msg)
	return c.publish(msg)
}
