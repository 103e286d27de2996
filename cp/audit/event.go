package audit

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/oklog/ulid/v2"
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
	body, err := appendEvent(nil, e)
	if err != nil {
		return nil, schemas.Wrap(schemas.CodeInvalid, err, "the audit event can't be encoded")
	}
	if len(body) > maxEventBytes {
		return nil, schemas.Errorf(schemas.CodeLimit, "the audit event %s has %d bytes: at most %d are kept", clip(e.GetAction()), len(body), maxEventBytes)
	}
	return body, nil
}

// appendEvent appends e as protobuf JSON, in one line. protojson makes the same of it in ten times the time, and two events are
// made of every dispatch.
func appendEvent(b []byte, e *runbusv1.AuditEvent) (_ []byte, err error) {
	if err := e.GetAt().CheckValid(); err != nil {
		return nil, err
	}
	b = slices.Grow(b, 512)
	first := byte('{')
	text := func(name, value string) {
		if value == "" || err != nil {
			return
		}
		b = append(append(append(b, first, '"'), name...), '"', ':')
		b, err = appendText(b, value)
		first = ','
	}
	text("id", e.GetId())
	if err == nil {
		b = append(b, first)
		b = append(e.GetAt().AsTime().AppendFormat(append(b, `"at":"`...), "2006-01-02T15:04:05.000000000Z"), '"')
		first = ','
	}
	text("tenant", e.GetTenant())
	text("actor", e.GetActor())
	text("action", e.GetAction())
	text("subject", e.GetSubject())
	text("outcome", e.GetOutcome())
	if details := e.GetDetails(); len(details) > 0 && err == nil {
		b = append(b, `,"details":`...)
		var few [8]string
		names := few[:0]
		for name := range details {
			names = append(names, name)
		}
		slices.Sort(names)
		first = '{'
		for _, name := range names {
			if b, err = appendText(append(b, first), name); err != nil {
				break
			}
			if b, err = appendText(append(b, ':'), details[name]); err != nil {
				break
			}
			first = ','
		}
		b = append(b, '}')
	}
	return append(b, '}'), err
}

// appendText appends a JSON string. Text that is not UTF-8 is an error, as in protobuf.
func appendText(b []byte, s string) ([]byte, error) {
	plain := true
	for i := range len(s) {
		if c := s[i]; c < 0x20 || c >= 0x7f || c == '"' || c == '\\' {
			plain = false
			break
		}
	}
	if plain {
		return append(append(append(b, '"'), s...), '"'), nil
	}
	if !utf8.ValidString(s) {
		return b, errors.New("a text of an audit event is not UTF-8")
	}
	var quoted bytes.Buffer
	out := json.NewEncoder(&quoted)
	out.SetEscapeHTML(false)
	if err := out.Encode(s); err != nil {
		return b, err
	}
	return append(b, bytes.TrimSuffix(quoted.Bytes(), []byte("\n"))...), nil
}

func clip(s string) string {
	const most = 64
	if len(s) <= most {
		return s
	}
	return fmt.Sprintf("%.64s…", s)
}
