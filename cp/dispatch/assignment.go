package dispatch

import (
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Numbers of the fields of RunnerWorkAssignment and of Timestamp.
const (
	fieldDispatch, fieldSession                    = 1, 2
	fieldRequest, fieldReplica                     = 83, 84
	fieldAcceptBy, fieldDeadline                   = 85, 86
	fieldCredentials, fieldWindow                  = 87, 88
	fieldSeconds, fieldNanos      protowire.Number = 1, 2
)

// assignment is the RunnerWorkAssignment of a run, encoded. It is written by hand, since one is written at every dispatch: neither
// is the caller's request copied, nor is an object made.
func (r *run) assignment(acceptBy time.Time, window int64) ([]byte, error) {
	b := slices.Grow(r.body[:0], r.sized.all+len(r.id)+len(r.runner.Session)+len(r.replica)+128)
	b = appendText(b, fieldDispatch, r.id)
	b = appendText(b, fieldSession, r.runner.Session)
	b = protowire.AppendTag(b, fieldRequest, protowire.BytesType)
	b, err := r.sized.append(protowire.AppendVarint(b, uint64(r.sized.all)), r.fetch)
	if err != nil {
		return nil, err
	}
	b = appendText(b, fieldReplica, r.replica)
	b = appendTime(b, fieldAcceptBy, acceptBy)
	b = appendTime(b, fieldDeadline, r.deadline)
	if len(r.secrets) > 0 {
		b = appendNumber(b, fieldCredentials, 1)
	}
	b = appendNumber(b, fieldWindow, window)
	if cap(b) <= keepBody {
		r.body = b // it has been written before others get it (recycle)
	}
	return b, nil
}

// keepBody is how much memory for an assignment is kept with that of a run.
const keepBody = 4 << 10

func appendText(b []byte, field protowire.Number, text string) []byte {
	return protowire.AppendString(protowire.AppendTag(b, field, protowire.BytesType), text)
}

func appendNumber(b []byte, field protowire.Number, n int64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), uint64(n))
}

func appendTime(b []byte, field protowire.Number, at time.Time) []byte {
	seconds, nanos := uint64(at.Unix()), uint64(at.Nanosecond())
	b = protowire.AppendTag(b, field, protowire.BytesType)
	b = protowire.AppendVarint(b, uint64(protowire.SizeTag(fieldSeconds)+protowire.SizeVarint(seconds)+protowire.SizeTag(fieldNanos)+protowire.SizeVarint(nanos)))
	b = protowire.AppendVarint(protowire.AppendTag(b, fieldSeconds, protowire.VarintType), seconds)
	return protowire.AppendVarint(protowire.AppendTag(b, fieldNanos, protowire.VarintType), nanos)
}

// assignmentForOps is an assignment as ops sees it, nil while nobody there watches.
func (d *Dispatcher) assignmentForOps(subject string, body []byte) *runbusv1.RunnerWorkAssignment {
	if !d.watched(subject) {
		return nil
	}
	m := &runbusv1.RunnerWorkAssignment{}
	if err := proto.Unmarshal(body, m); err != nil {
		d.d.Log.Error("an assignment can't be copied for ops", "error", err)
		return nil
	}
	return m
}
