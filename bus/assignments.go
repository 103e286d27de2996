package bus

import (
	"sync"
	"unicode/utf8"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Assignments calls f for each assignment in a message that is a RunnerWorkAssignment or a RunnerWorkAssignments, in order, with the
// trace context it came with. It calls f for all of them or, with an error of CodeInvalid, for none. An assignment is f's until f returns;
// its strings and maps f may keep.
func Assignments(msg *nats.Msg, f func(*runbusv1.RunnerWorkAssignment, Trace)) error {
	name := TypeOf(msg)
	if name != "RunnerWorkAssignment" && name != "RunnerWorkAssignments" {
		return schemas.Errorf(schemas.CodeInvalid, "the message is a %q, not an assignment", clip(name))
	}
	if ct := msg.Header.Get(HeaderContentType); ct != "" && ct != ContentType {
		return schemas.Errorf(schemas.CodeInvalid, "the %s has content type %q, not %s", name, clip(ct), ContentType)
	}
	if len(msg.Data) > MaxPayload {
		return schemas.Errorf(schemas.CodeInvalid, "the %s has %d bytes, over the %d of the bus", name, len(msg.Data), MaxPayload)
	}
	r, ok := assignmentReaders.Get().(*assignmentReader)
	if !ok {
		r = &assignmentReader{}
	}
	defer r.release()
	if name == "RunnerWorkAssignment" {
		m, err := r.read(msg.Data)
		if err == nil {
			f(m, TraceOf(msg))
		}
		return err
	}
	body := fields{rest: msg.Data}
	for body.next() {
		switch {
		case body.is(assignmentsNumber, protowire.BytesType):
			if _, err := r.read(body.bytes); err != nil {
				return err
			}
		case body.is(settledNumber, protowire.BytesType) && utf8.Valid(body.bytes): // see readSettled
		default:
			return errNoAssignment()
		}
	}
	if !body.ok {
		return errNoAssignment()
	}
	for _, parts := range r.list[:r.used] {
		m := &parts.assignment
		f(m, Trace{Parent: m.GetTraceparent(), State: m.GetTracestate()}.clamped())
	}
	return nil
}

func errNoAssignment() *schemas.Error {
	return schemas.Errorf(schemas.CodeInvalid, "a RunnerWorkAssignments has something that is not an assignment")
}

// assignmentReader is memory for the assignments of a message, which messages take turns with: made anew it was a fifth of what a runner
// allocates (measured, small works).
type assignmentReader struct {
	known names
	list  []*assignmentParts
	used  int // of list
}

var assignmentReaders sync.Pool

// mostReader is how many assignments a reader that is kept has memory for.
const mostReader = 256

// read reads one encoded assignment.
func (r *assignmentReader) read(body []byte) (*runbusv1.RunnerWorkAssignment, error) {
	if r.used == len(r.list) {
		r.list = append(r.list, &assignmentParts{})
	}
	parts := r.list[r.used]
	r.used++
	m := &parts.assignment
	if r.known.assignment(body, parts) {
		return m, nil
	}
	if err := unmarshal("RunnerWorkAssignment", body, m); err != nil { // which begins with a reset
		return nil, err
	}
	return m, nil
}

// release gives the memory back.
func (r *assignmentReader) release() {
	if r.used > mostReader {
		return
	}
	for _, parts := range r.list[:r.used] {
		parts.reset()
	}
	r.used = 0
	assignmentReaders.Put(r)
}

// Numbers of the fields of RunnerWorkAssignment that others don't need.
const (
	assignmentRequestNumber, assignmentReplicaNumber                                                = 83, 84
	assignmentAcceptByNumber, assignmentDeadlineNumber                                              = 85, 86
	assignmentCredentialsFollowNumber, assignmentWindowNumber                      protowire.Number = 87, 88
	requestSourceNumber, requestQueryNumber, requestMaxRowsNumber, requestMaxBytes                  = 1, 2, 3, 4
)

// assignmentParts is an assignment with what is in it, in one piece of memory.
type assignmentParts struct {
	assignment         runbusv1.RunnerWorkAssignment
	request            runbusv1.RunFetchRequest
	source             runbusv1.Source
	acceptBy, deadline timestamppb.Timestamp
}

func (p *assignmentParts) reset() {
	p.assignment.Reset()
	p.request.Reset()
	p.source.Reset()
	p.acceptBy.Reset()
	p.deadline.Reset()
}

func (n *names) assignment(body []byte, parts *assignmentParts) bool {
	m := &parts.assignment
	f := fields{rest: body}
	for f.next() {
		var ok bool
		switch f.number {
		case dispatchNumber:
			ok = f.text(&m.DispatchId)
		case sessionNumber:
			ok = f.text(&n.session)
			m.Session = n.session
		case assignmentReplicaNumber:
			ok = f.text(&n.replica)
			m.Replica = n.replica
		case assignmentParentNumber:
			ok = f.text(&m.Traceparent)
		case assignmentStateNumber:
			ok = f.text(&m.Tracestate)
		case assignmentRequestNumber:
			ok = m.Request == nil && f.kind == protowire.BytesType
			if ok {
				m.Request = &parts.request
				ok = n.request(f.bytes, m.Request, &parts.source)
			}
		case assignmentAcceptByNumber:
			ok = m.AcceptBy == nil && f.timestamp(&parts.acceptBy)
			m.AcceptBy = &parts.acceptBy
		case assignmentDeadlineNumber:
			ok = m.Deadline == nil && f.timestamp(&parts.deadline)
			m.Deadline = &parts.deadline
		case assignmentCredentialsFollowNumber:
			m.CredentialsFollow, ok = protowire.DecodeBool(f.varint), f.kind == protowire.VarintType
		case assignmentWindowNumber:
			m.WindowBytes, ok = int64(f.varint), f.kind == protowire.VarintType
		case assignmentBundlesNumber:
			m.Bundles, ok = protowire.DecodeBool(f.varint), f.kind == protowire.VarintType
		case assignmentTogetherNumber:
			m.Together, ok = protowire.DecodeBool(f.varint), f.kind == protowire.VarintType
		case assignmentXxh3Number:
			m.Xxh3, ok = protowire.DecodeBool(f.varint), f.kind == protowire.VarintType
		case assignmentWholeNumber:
			m.Xxh3Whole, ok = protowire.DecodeBool(f.varint), f.kind == protowire.VarintType
		case assignmentTellNumber:
			m.ChunksTell, ok = protowire.DecodeBool(f.varint), f.kind == protowire.VarintType
		case assignmentOneNumber:
			m.Whole, ok = protowire.DecodeBool(f.varint), f.kind == protowire.VarintType
		default:
			return false
		}
		if !ok {
			return false
		}
	}
	return f.ok
}

// timestamp reads the field as a Timestamp.
func (f *fields) timestamp(into *timestamppb.Timestamp) (ok bool) {
	if f.kind != protowire.BytesType {
		return false
	}
	into.Seconds, into.Nanos, ok = readClock(f.bytes)
	return ok
}

func (n *names) request(body []byte, r *runbusv1.RunFetchRequest, source *runbusv1.Source) bool {
	f := fields{rest: body}
	for f.next() {
		var ok bool
		switch f.number {
		case requestSourceNumber:
			ok = r.Source == nil && f.kind == protowire.BytesType
			if ok {
				r.Source = source
				ok = n.source(f.bytes, r.Source)
			}
		case requestQueryNumber:
			ok = f.text(&r.Query)
		case requestMaxRowsNumber:
			r.MaxRows, ok = int64(f.varint), f.kind == protowire.VarintType
		case requestMaxBytes:
			r.MaxBytes, ok = int64(f.varint), f.kind == protowire.VarintType
		default:
			return false
		}
		if !ok {
			return false
		}
	}
	return f.ok
}

func (n *names) source(body []byte, s *runbusv1.Source) bool {
	f := fields{rest: body}
	for f.next() {
		switch {
		case f.number == 1 && f.text(&n.kind):
			s.Kind = n.kind
		case f.is(2, protowire.BytesType):
			var key, value string
			entry := fields{rest: f.bytes}
			for entry.next() {
				if entry.number == 1 && entry.text(&key) || entry.number == 2 && entry.text(&value) {
					continue
				}
				return false
			}
			if !entry.ok {
				return false
			}
			if s.Settings == nil {
				s.Settings = make(map[string]string)
			}
			s.Settings[key] = value
		default:
			return false
		}
	}
	return f.ok
}
