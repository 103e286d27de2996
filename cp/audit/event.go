package audit

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
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

// Subject names what an event is about, `kind:name`, by a name that somebody gave: kind alone if that may stand nowhere, since it is
// empty, no plain word of 64 characters at most, or looks like a credential.
func Subject(kind, name string) string {
	if schemas.ValidRunnerID(name) != nil { // the widest grammar of a name
		return kind
	}
	return kind + ":" + name
}

// Brief is an event as values, for what is recorded at every dispatch: Log.Jot makes no object of it. Details stand in the order
// of their names, each once; the rules of Event hold for them.
type Brief struct {
	At                                      time.Time // zero: now
	Tenant, Actor, Action, Subject, Outcome string
	Details                                 []Detail
}

// Detail is one detail of an event: text, or what Int and Took make.
type Detail struct {
	Name, Value string
	number      int64
	form        form // of number; asText: the detail is Value
}

// form is how a number is written.
type form uint8

const (
	asText form = iota
	asInt
	asDuration
)

// Int is n in decimal. It is written where the event is, so that there need not be a string of it.
func Int(name string, n int64) Detail { return Detail{Name: name, number: n, form: asInt} }

// Took is d as its String says it, written as Int's number is.
func Took(name string, d time.Duration) Detail {
	return Detail{Name: name, number: int64(d), form: asDuration}
}

// text is the detail's value.
func (d Detail) text() string {
	switch d.form {
	case asInt:
		return strconv.FormatInt(d.number, 10)
	case asDuration:
		return time.Duration(d.number).String()
	case asText:
	}
	return d.Value
}

// append appends the detail as a member of a JSON object.
func (d *Detail) append(b []byte) ([]byte, error) {
	b, err := appendText(b, d.Name)
	if err != nil {
		return nil, err
	}
	return d.appendValue(append(b, ':'))
}

// appendValue appends the detail's value as a JSON string.
func (d *Detail) appendValue(b []byte) ([]byte, error) {
	switch d.form {
	case asInt:
		return append(strconv.AppendInt(append(b, '"'), d.number, 10), '"'), nil
	case asDuration:
		return append(append(append(b, '"'), time.Duration(d.number).String()...), '"'), nil
	case asText:
	}
	return appendText(b, d.Value)
}

// Event is e as an object, for Record.
func (e *Brief) Event() *runbusv1.AuditEvent {
	event := &runbusv1.AuditEvent{Tenant: e.Tenant, Actor: e.Actor, Action: e.Action, Subject: e.Subject, Outcome: e.Outcome}
	if len(e.Details) > 0 {
		event.Details = make(map[string]string, len(e.Details))
	}
	for _, d := range e.Details {
		event.Details[d.Name] = d.text()
	}
	return event
}

// encodeEvent fills what the log fills, and is e as it will stand in a batch.
func encodeEvent(e *runbusv1.AuditEvent, now time.Time) ([]byte, error) {
	if e.Id == "" {
		e.Id = schemas.NewULID(now)
	}
	if e.At == nil {
		e.At = timestamppb.New(now)
	}
	body, err := appendEvent(nil, e)
	if err == nil {
		err = checkEvent(e.GetActor(), e.GetAction(), len(body))
	}
	if err != nil {
		return nil, err
	}
	return body, nil
}

// checkEvent refuses an event that says too little, or too much: it has size bytes encoded.
func checkEvent(actor, action string, size int) error {
	if action == "" || actor == "" {
		return schemas.Errorf(schemas.CodeInvalid, "an audit event needs an actor and an action")
	}
	if size > maxEventBytes {
		return schemas.Errorf(schemas.CodeLimit, "the audit event %s has %d bytes: at most %d are kept", clip(action), size, maxEventBytes)
	}
	return nil
}

// appendEvent appends e as protobuf JSON, in one line. protojson makes the same of it in ten times the time.
func appendEvent(b []byte, e *runbusv1.AuditEvent) ([]byte, error) {
	if err := e.GetAt().CheckValid(); err != nil {
		return nil, schemas.Wrap(schemas.CodeInvalid, err, "the audit event can't be encoded")
	}
	var few [8]Detail
	details := few[:0]
	for name, value := range e.GetDetails() {
		details = append(details, Detail{Name: name, Value: value})
	}
	slices.SortFunc(details, func(a, b Detail) int { return strings.Compare(a.Name, b.Name) })
	b = slices.Grow(b, 512)
	b = append(b, '{')
	if e.GetId() != "" {
		var err error
		if b, err = appendText(append(b, `"id":`...), e.GetId()); err != nil {
			return nil, err
		}
		b = append(b, ',')
	}
	b = append(b, `"at":"`...)
	b = e.GetAt().AsTime().AppendFormat(b, "2006-01-02T15:04:05.000000000Z")
	return appendRest(b, &Brief{
		Tenant: e.GetTenant(), Actor: e.GetActor(), Action: e.GetAction(), Subject: e.GetSubject(), Outcome: e.GetOutcome(), Details: details,
	})
}

// appendRest appends an event from the end of its time on.
func appendRest(b []byte, e *Brief) ([]byte, error) {
	b, err := appendWho(b, e)
	if err != nil {
		return nil, err
	}
	return appendWhat(b, e)
}

// appendWho appends who did what, from the end of an event's time on.
func appendWho(b []byte, e *Brief) ([]byte, error) {
	return appendFields(append(b, '"'), [...]field{{`,"tenant":`, e.Tenant}, {`,"actor":`, e.Actor}, {`,"action":`, e.Action}})
}

// appendWhat appends the rest of an event, behind who did what.
func appendWhat(b []byte, e *Brief) ([]byte, error) {
	b, err := appendFields(b, [...]field{{`,"subject":`, e.Subject}, {`,"outcome":`, e.Outcome}, {}})
	if err != nil {
		return nil, err
	}
	before := `,"details":{`
	for i := range e.Details {
		if b, err = e.Details[i].append(append(b, before...)); err != nil {
			return nil, err
		}
		before = `,`
	}
	if len(e.Details) > 0 {
		b = append(b, '}')
	}
	return append(b, '}'), nil
}

// field is a field of an event. Its name is JSON, with what stands before and behind it.
type field struct{ name, value string }

// appendFields appends those of the fields that are not empty.
func appendFields(b []byte, fields [3]field) ([]byte, error) {
	var err error
	for i := range fields {
		f := &fields[i]
		if f.value == "" {
			continue
		}
		if b, err = appendText(append(b, f.name...), f.value); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// who writes who did what, of which many events in a row say the same. The zero value is ready. Not safe for concurrent use.
type who struct {
	tenant, actor, action string
	text                  []byte // empty: none was written yet
}

// append appends what appendWho does.
func (w *who) append(b []byte, e *Brief) ([]byte, error) {
	if len(w.text) == 0 || e.Action != w.action || e.Actor != w.actor || e.Tenant != w.tenant {
		text, err := appendWho(w.text[:0], e)
		if err != nil {
			*w = who{}
			return nil, err
		}
		*w = who{tenant: e.Tenant, actor: e.Actor, action: e.Action, text: text}
	}
	return append(b, w.text...), nil
}

// counter makes ULIDs of which many are needed: their random part is that of the first one, and a number. The zero value is
// ready. Not safe for concurrent use.
type counter struct {
	ms   int64 // of text
	last uint64
	text [ulid.EncodedSize]byte
}

const (
	ulidTime  = 10 // digits of a ULID for its time
	ulidCount = 8  // digits for the number, behind 40 random bits
	digits32  = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
)

// next moves on to the next id, of this time, which is then in c.text; c.last is its number.
func (c *counter) next(at time.Time) {
	if ms := at.UnixMilli(); ms != c.ms || c.last == 0 {
		c.ms = ms
		fresh := schemas.NewULID(at)
		if c.last == 0 {
			copy(c.text[:], fresh)
		}
		copy(c.text[:ulidTime], fresh)
	}
	c.last++
	for i, n := len(c.text)-1, c.last; i >= len(c.text)-ulidCount; i, n = i-1, n/32 {
		if c.text[i] = digits32[n%32]; n%32 != 0 && c.last > 1 {
			break // the digits before are those of the last number
		}
	}
}

// clock writes times, of which many are within one second. Not safe for concurrent use; the zero value is ready.
type clock struct {
	second int64
	text   [len("2006-01-02T15:04:05.")]byte
}

// append appends at, in UTC, to the nanosecond.
func (c *clock) append(b []byte, at time.Time) []byte {
	if s := at.Unix(); s != c.second || c.text[0] == 0 {
		c.second = s
		at.UTC().AppendFormat(c.text[:0], "2006-01-02T15:04:05.")
	}
	digits := [...]byte{'0', '0', '0', '0', '0', '0', '0', '0', '0', 'Z'}
	n := uint32(at.Nanosecond())
	for i := 8; i > 0; i -= 2 {
		two := n % 100
		n /= 100
		digits[i-1], digits[i] = '0'+byte(two/10), '0'+byte(two%10)
	}
	digits[0] += byte(n)
	return append(append(b, c.text[:]...), digits[:]...)
}

// appendText appends a JSON string. Text that is not UTF-8 is an error, as in protobuf.
func appendText(b []byte, s string) ([]byte, error) {
	if !isPlain(s) {
		if !utf8.ValidString(s) {
			return nil, schemas.Errorf(schemas.CodeInvalid, "a text of an audit event is not UTF-8")
		}
		return append(appendEscaped(append(b, '"'), s), '"'), nil
	}
	return append(append(append(b, '"'), s...), '"'), nil
}

// appendEscaped appends valid UTF-8 as it stands in a JSON string. Only what JSON asks for is escaped, so that a duration of
// microseconds, which has a letter beyond ASCII and is in most dispatches, costs no more than other text.
func appendEscaped(b []byte, s string) []byte {
	begin := 0
	for i := range len(s) {
		c := s[i]
		if c >= 0x20 && c != '"' && c != '\\' {
			continue
		}
		b = append(b, s[begin:i]...)
		if begin = i + 1; c >= 0x20 {
			b = append(b, '\\', c)
			continue
		}
		b = append(b, '\\', 'u', '0', '0', digits16[c>>4], digits16[c&0xf])
	}
	return append(b, s[begin:]...)
}

const digits16 = "0123456789abcdef"

// isPlain reports whether s stands in JSON as it is: printable ASCII without quotes and backslashes. It looks at eight bytes at a
// time, at the last eight of a longer text whether or not it has seen some of them, and at the two halves of a shorter one, which
// overlap, as at one word.
func isPlain(s string) bool {
	switch n := len(s); {
	case n >= 8:
		for i := 0; i < n-8; i += 8 {
			if !plainWord(s[i : i+8]) {
				return false
			}
		}
		return plainWord(s[n-8:])
	case n >= 4:
		return plainBits(uint64(le32(s)) | uint64(le32(s[n-4:]))<<32)
	}
	return plainBytes(s)
}

// le32 is the first four bytes of s.
func le32(s string) uint32 {
	_ = s[3]
	return uint32(s[0]) | uint32(s[1])<<8 | uint32(s[2])<<16 | uint32(s[3])<<24
}

// plainWord is isPlain of eight bytes.
func plainWord(s string) bool {
	_ = s[7]
	return plainBits(uint64(s[0]) | uint64(s[1])<<8 | uint64(s[2])<<16 | uint64(s[3])<<24 | uint64(s[4])<<32 | uint64(s[5])<<40 | uint64(s[6])<<48 | uint64(s[7])<<56)
}

// plainBits is isPlain of the eight bytes of w. What is not plain sets the highest bit of its byte in the sum: that of w for what is not
// ASCII, of w+1 for DEL, and otherwise that of a difference which borrows; a borrow may make the byte above look so, too, but only where
// there is one that is not plain.
func plainBits(w uint64) bool {
	const ones, high = 0x0101010101010101, 0x8080808080808080
	quote, slash := w^('"'*ones), w^('\\'*ones)
	return (w|(w+ones)|(w-0x20*ones)|(quote-ones)|(slash-ones))&high == 0
}

func plainBytes(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < 0x20 || c >= 0x7f || c == '"' || c == '\\' {
			return false
		}
	}
	return true
}

func clip(s string) string {
	const most = 64
	if len(s) <= most {
		return s
	}
	return fmt.Sprintf("%.64s…", s)
}
