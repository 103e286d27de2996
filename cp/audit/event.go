package audit

import (
	"crypto/rand"
	"fmt"
	"time"

	"github.com/oklog/ulid/v2"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// ActorPlatform is the actor of what the control plane does by itself.
const ActorPlatform = "control-plane"

// Event builds an event. kv are pairs of detail names and values; they must not hold a secret, and a name without a value
// gets an empty one. The caller sets Tenant where the event belongs to one; Record and Note fill id and time.
func Event(actor, action, subject, outcome string, kv ...string) *runbusv1.AuditEvent {
	e := &runbusv1.AuditEvent{Actor: actor, Action: action, Subject: subject, Outcome: outcome}
	if len(kv) > 0 {
		e.Details = make(map[string]string, (len(kv)+1)/2)
	}
	for i := 0; i < len(kv); i += 2 {
		v := ""
		if i+1 < len(kv) {
			v = kv[i+1]
		}
		e.Details[kv[i]] = v
	}
	return e
}

// encodeEvent fills what the log fills, and is e as it will stand in a batch.
func encodeEvent(e *runbusv1.AuditEvent, now time.Time) ([]byte, error) {
	if e.GetAction() == "" || e.GetActor() == "" {
		return nil, schemas.Errorf(schemas.CodeInvalid, "an audit event needs an actor and an action")
	}
	if e.Id == "" {
		id, err := ulid.New(ulid.Timestamp(now), rand.Reader)
		if err != nil {
			return nil, schemas.Wrap(schemas.CodeFailed, err, "the audit event has no id")
		}
		e.Id = id.String()
	}
	if e.At == nil {
		e.At = timestamppb.New(now)
	}
	body, err := protojson.Marshal(e)
	if err != nil {
		return nil, schemas.Wrap(schemas.CodeInvalid, err, "the audit event can't be encoded")
	}
	if len(body) > maxEventBytes {
		return nil, schemas.Errorf(schemas.CodeLimit, "the audit event %s has %d bytes: at most %d are kept", clip(e.GetAction()), len(body), maxEventBytes)
	}
	return body, nil
}

func clip(s string) string {
	const most = 64
	if len(s) <= most {
		return s
	}
	return fmt.Sprintf("%.64s…", s)
}
