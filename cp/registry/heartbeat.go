package registry

import (
	"context"
	"errors"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// serveHeartbeat refreshes the record of the session, or tells the sender what became of it: `rehello` when the key is gone,
// `replaced` when another process holds it (SPEC E7, E8).
func (r *Registry) serveHeartbeat(ctx context.Context, msg *nats.Msg, ref schemas.RunnerRef) {
	var beat runbusv1.RunnerHeartbeat
	if err := bus.Decode(msg, &beat); err != nil || !validSession(ref, beat.GetSession()) {
		r.helloFirst(msg, ref)
		return
	}
	result, err := r.refresh(ctx, ref, beat.GetSession(), beat.GetProcessNonce(), func(rec *Record) bool {
		number := beat.GetNumber()
		if number != 0 && number <= rec.Beat { // a later one was handled before, here or by another replica
			return false
		}
		rec.LoadScore, rec.InFlight, rec.Limit = boundLoad(beat.GetLoadScore()), boundCount(beat.GetInFlight()), boundCount(beat.GetLimit())
		rec.Draining, rec.Ready, rec.Beat = beat.GetDraining(), true, number
		return true
	})
	r.metrics.heartbeats.WithLabelValues(result).Inc()
	switch {
	case err != nil:
		r.d.Log.Warn("heartbeat not recorded", "runner", ref.Runner, "tenant", ref.Tenant, "error", err)
	case result == "rehello":
		if msg.Reply != "" {
			r.helloFirst(msg, ref) // whoever asks for an answer gets one; a runner's heartbeat doesn't
		}
		r.order(ref, beat.GetSession(), &runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Rehello{Rehello: &runbusv1.RehelloOrder{}}})
	case result == "replaced":
		r.order(ref, beat.GetSession(), &runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Replaced{
			Replaced: &runbusv1.ReplacedOrder{Reason: replacedText(ref).Message},
		}})
	}
}

// serveGoodbye takes a runner out of the live view; it stays known (SPEC E8). The key stays until it expires, marked, so that
// every replica learns that it was a goodbye.
func (r *Registry) serveGoodbye(ctx context.Context, msg *nats.Msg, ref schemas.RunnerRef) {
	var bye runbusv1.RunnerGoodbye
	if err := bus.Decode(msg, &bye); err != nil || !validSession(ref, bye.GetSession()) {
		r.helloFirst(msg, ref)
		return
	}
	reason := bye.GetReason()
	if checkText("reason", reason, maxName) != nil {
		reason = ""
	}
	result, err := r.refresh(ctx, ref, bye.GetSession(), bye.GetProcessNonce(), func(rec *Record) bool {
		rec.Left, rec.LeftReason, rec.InFlight = true, reason, 0
		return true
	})
	r.metrics.goodbyes.WithLabelValues(result).Inc()
	if err != nil {
		r.d.Log.Warn("goodbye not recorded", "runner", ref.Runner, "tenant", ref.Tenant, "error", err)
	}
}

// refresh changes the record of one session by compare-and-set. The result is `ok`; `rehello` when there is no record, or the
// process has another session by now; `replaced` when another process holds the id; `left` when the session said goodbye;
// `overtaken` when change returns false, and nothing is written; `error`.
func (r *Registry) refresh(ctx context.Context, ref schemas.RunnerRef, session, nonce string, change func(*Record) bool) (string, error) {
	rec, revision, there := r.record(ref)
	seen := there && rec.Session == session // else the view may only be behind
	for range casTries {
		if !seen {
			row, err := r.heartbeats.Get(ctx, schemas.RunnerKey(ref))
			if errors.Is(err, jetstream.ErrNotFound) {
				return "rehello", nil
			}
			if err != nil {
				return "error", err
			}
			rec, revision = row.Value, row.Revision
		}
		switch {
		case rec.Session != session && rec.ProcessNonce == nonce:
			return "rehello", nil
		case rec.Session != session:
			return "replaced", nil
		case rec.Left:
			return "left", nil
		}
		if !change(&rec) {
			return "overtaken", nil
		}
		rec.LastSeen, rec.Replica = r.d.Now(), r.d.Replica
		_, err := r.heartbeats.Update(ctx, schemas.RunnerKey(ref), rec, revision)
		if err == nil {
			r.notes.add(ref, rec.Name, rec.Version, rec.LastSeen)
			return "ok", nil
		}
		if !errors.Is(err, jetstream.ErrLost) {
			return "error", err
		}
		seen = false
	}
	return "error", jetstream.ErrLost
}

// helloFirst drops what came from a client that never said hello, counts it, and says so in the sender's own inbox if it
// named one (SPEC E6).
func (r *Registry) helloFirst(msg *nats.Msg, ref schemas.RunnerRef) {
	r.metrics.dropped.WithLabelValues("hello_first").Inc()
	if msg.Reply == "" {
		return
	}
	if err := r.d.Serve.Answer(msg, &runbusv1.EnrollmentAccepted{
		RunnerId: ref.String(), Error: schemas.ToDetail(schemas.ErrHelloFirst()),
	}); err != nil {
		r.metrics.dropped.WithLabelValues("foreign_reply").Inc()
	}
}
