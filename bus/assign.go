package bus

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"sync"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/org-runink/runbus/schemas"
)

// ErrNotSent says that an assignment could not be handed to the connection, after Assign returned.
var ErrNotSent = errors.New("the assignment was not sent")

// assignmentsBytes is the most that assignments in one message have together.
const assignmentsBytes = 15 << 10

// mostTogether is how many assignments are not made to wait for more.
const mostTogether = 64

// batchBase is the base of the number of a message with several assignments, in its reply subject behind `all`.
const batchBase = 36

// assignment is one that waits for its turn.
type assignment struct {
	to       *Receiver
	body     []byte
	together bool
	settles  bool // what is settled may ride on it
	trace    Trace
}

// assigner is the queue of all assignments of a replica. Whoever finds nobody writing writes, for all.
type assigner struct {
	assigning sync.Mutex // guards what follows, but memory
	queue     []assignment
	spare     []assignment // memory for queue
	writing   bool         // somebody has the writer's part
	left      bool         // …who left it to Receivers.write
	gathering gathering

	batches uint64 // numbers given to messages with several; belongs to who has the writer's part
	body    []byte // memory for those, likewise
}

// Assign publishes the dispatch's assignment on the work subject of its session: body is the encoded RunnerWorkAssignment without
// the fields that tell what this side reads, and is the stream's until it is Written. to is what the runner can do. Assignments to one
// session that come at the same time leave in one message if it reads RunnerWorkAssignments.
//
// An error says that the assignment was not sent, and that it is too large (CodeLimit) or that the link did not take it. Where
// another goroutine is writing, Assign returns at once, and Next returns an error that is ErrNotSent if it turns out so. If
// nobody is subscribed, Next returns ErrNoResponders; then Assign may be called again.
func (r *Receiver) Assign(t Trace, to Abilities, body []byte) error {
	body = appendBool(appendBool(body, assignmentBundlesNumber, true), assignmentTogetherNumber, true)
	body = appendBool(appendBool(body, assignmentXxh3Number, true), assignmentWholeNumber, to.XXH3)
	body = appendBool(appendBool(body, assignmentTellNumber, to.ChunksTell), assignmentOneNumber, to.Whole)
	if len(body) > MaxPayload-headerRoom {
		return schemas.Errorf(schemas.CodeLimit, "RunnerWorkAssignment of %d bytes is over the %d bytes of the bus", len(body), MaxPayload-headerRoom)
	}
	settles := to.Settled && to.Assignments
	r.mu.Lock() // whoever closes the stream reads them
	r.patient, r.settles = to.ChunksTell, settles
	r.mu.Unlock()
	r.unwritten.Add(1)
	all := r.all
	all.assigning.Lock()
	all.queue = append(all.queue, assignment{r, body, to.Assignments, settles, t.clamped()})
	// Half of those that are open leave together: then a runner works on these while the others are handed out.
	full := len(all.queue) >= min((int(all.waits.Load())+1)/2, mostTogether)
	if all.writing && (!full || !all.gathering.takeOver()) {
		all.assigning.Unlock()
		return nil
	}
	all.writing = true
	if !full && !all.gathering.giveWay(&all.assigning, func() int { return len(all.queue) }) {
		all.assigning.Unlock()
		return nil
	}
	all.assigning.Unlock()
	return all.assign(r, rounds)
}

// assign writes what is queued, as often as most; then Receivers.write goes on. The caller has the writer's part and gives it back.
// The error is that of the caller's own assignment.
func (r *Receivers) assign(caller *Receiver, most int) (err error) {
	for range most {
		r.assigning.Lock()
		turn := r.queue
		r.queue, r.spare = r.spare[:0], nil
		if len(turn) == 0 {
			r.writing, r.spare = false, turn
			r.assigning.Unlock()
			return err
		}
		r.assigning.Unlock()
		for rest := turn; len(rest) > 0; {
			n := r.alike(rest)
			failed := r.assignTogether(rest[:n])
			for _, a := range rest[:n] {
				switch {
				case failed == nil:
				case a.to == caller:
					err = failed
				default:
					a.to.fail(fmt.Errorf("%w: %w", ErrNotSent, failed))
				}
				a.to.unwritten.Add(-1) // from here on it may be another's
			}
			rest = rest[n:]
		}
		clear(turn)
		r.assigning.Lock()
		r.spare = turn[:0]
		r.assigning.Unlock()
	}
	r.assigning.Lock()
	r.left = true
	r.assigning.Unlock()
	poke(r.wake)
	return err
}

// assignLeft goes on where a caller of Assign stopped writing for others.
func (r *Receivers) assignLeft() {
	r.assigning.Lock()
	mine := r.left
	r.left = false
	r.assigning.Unlock()
	if mine {
		_ = r.assign(nil, math.MaxInt)
	}
}

// alike moves those of the queue that leave in one message with the first to its beginning, and returns how many they are.
func (r *Receivers) alike(queue []assignment) int {
	first, n, size := queue[0], 1, len(queue[0].body)
	if !first.together {
		return 1
	}
	for i := 1; i < len(queue); i++ {
		a := queue[i]
		if !a.together || a.to.session != first.to.session || a.to.ref != first.to.ref || size+len(a.body) > assignmentsBytes {
			continue
		}
		size += len(a.body)
		queue[n], queue[i] = queue[i], queue[n]
		n++
	}
	return n
}

// assignTogether publishes assignments to one session in one message.
func (r *Receivers) assignTogether(list []assignment) error {
	first := list[0]
	msg := &nats.Msg{Subject: schemas.WorkSubject(first.to.ref, first.to.session)}
	body := r.body[:0]
	if first.settles && len(first.body) <= assignmentsBytes {
		body = r.settled(first.to.ref, first.to.session, body)
	}
	if len(list) == 1 && len(body) == 0 {
		first.to.batch.Store(0)
		msg.Reply, msg.Header, msg.Data = first.to.ReplySubject(), frameHeaders["RunnerWorkAssignment"], first.body
		return r.conn.publish(first.trace.on(msg))
	}
	r.batches++
	msg.Reply = schemas.ResultCtlSubject(first.to.ref, r.replica, together+strconv.FormatUint(r.batches, batchBase))
	for _, a := range list {
		a.to.batch.Store(r.batches)
		traced := appendString(appendString(a.body, assignmentParentNumber, a.trace.Parent), assignmentStateNumber, a.trace.State)
		body = protowire.AppendBytes(protowire.AppendTag(body, assignmentsNumber, protowire.BytesType), traced)
	}
	r.body = body
	msg.Header, msg.Data = frameHeaders["RunnerWorkAssignments"], body
	return r.conn.publish(msg)
}
