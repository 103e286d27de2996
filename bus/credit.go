package bus

import (
	"unicode/utf8"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// credit is a RunnerWorkCredit.
type credit struct {
	dispatch, session string
	acknowledged      uint64
	window            int64
	resend            bool
	settled           bool // in place of acknowledged and window: the result is there, and all before it
}

func creditOf(m *runbusv1.RunnerWorkCredit) credit {
	return credit{
		dispatch: m.GetDispatchId(), session: m.GetSession(), acknowledged: m.GetAcknowledged(), window: m.GetWindowBytes(), resend: m.GetResend(),
	}
}

func (c credit) message() *runbusv1.RunnerWorkCredit {
	return &runbusv1.RunnerWorkCredit{
		DispatchId: c.dispatch, Session: c.session, Acknowledged: c.acknowledged, WindowBytes: c.window, Resend: c.resend,
	}
}

// appendCredit writes c as an entry of RunnerWorkCredits.
func appendCredit(b []byte, c credit) []byte {
	const most = 127 // ids have at most 64 bytes, but nobody holds them to it here
	b = protowire.AppendTag(b, creditsNumber, protowire.BytesType)
	b = append(b, 0)
	at := len(b)
	b = appendString(appendString(b, dispatchNumber, c.dispatch), sessionNumber, c.session)
	b = appendInt(appendUint(b, creditAcknowledgedNumber, c.acknowledged), creditWindowNumber, c.window)
	b = appendBool(b, creditResendNumber, c.resend)
	if n := len(b) - at; n <= most {
		b[at-1] = byte(n)
		return b
	}
	entry := append([]byte(nil), b[at:]...)
	return protowire.AppendBytes(b[:at-1], entry)
}

// readCredits calls f for each entry of a RunnerWorkCredits. The dispatch is given as bytes of the message; c.dispatch is empty. A
// body that is not one is an error of CodeInvalid; f may have been called for what comes before the fault.
func readCredits(msg *nats.Msg, f func(dispatch []byte, c credit)) error {
	if name := TypeOf(msg); name != "RunnerWorkCredits" {
		return schemas.Errorf(schemas.CodeInvalid, "the message is a %q, not a RunnerWorkCredits", clip(name))
	}
	if ct := msg.Header.Get(HeaderContentType); ct != "" && ct != ContentType {
		return schemas.Errorf(schemas.CodeInvalid, "the RunnerWorkCredits has content type %q, not %s", clip(ct), ContentType)
	}
	var known names
	for body := msg.Data; len(body) > 0; {
		one, rest, err := field(body, creditsNumber)
		if err != nil {
			return schemas.Errorf(schemas.CodeInvalid, "a RunnerWorkCredits has something that is not a credit")
		}
		body = rest
		dispatch, c, ok := known.credit(one)
		if !ok {
			m := &runbusv1.RunnerWorkCredit{}
			if err := unmarshal("RunnerWorkCredits", one, m); err != nil {
				return err
			}
			c = creditOf(m)
			dispatch, c.dispatch = []byte(c.dispatch), ""
		}
		f(dispatch, c)
	}
	return nil
}

// readSettled calls f for each dispatch that a RunnerWorkAssignments says is settled, with its id as bytes of the message. Of a message that is
// none it reads what comes before the fault: Assignments says what is wrong.
func readSettled(msg *nats.Msg, f func(dispatch []byte)) {
	if TypeOf(msg) != "RunnerWorkAssignments" {
		return
	}
	for body := (fields{rest: msg.Data}); body.next(); {
		if body.is(settledNumber, protowire.BytesType) {
			f(body.bytes)
		}
	}
}

// credit reads one entry.
func (n *names) credit(body []byte) (dispatch []byte, c credit, ok bool) {
	f := fields{rest: body}
	for f.next() {
		switch {
		case f.is(dispatchNumber, protowire.BytesType) && utf8.Valid(f.bytes):
			dispatch = f.bytes
		case f.number == sessionNumber && f.text(&n.session):
			c.session = n.session
		case f.is(creditAcknowledgedNumber, protowire.VarintType):
			c.acknowledged = f.varint
		case f.is(creditWindowNumber, protowire.VarintType):
			c.window = int64(f.varint)
		case f.is(creditResendNumber, protowire.VarintType):
			c.resend = protowire.DecodeBool(f.varint)
		default:
			return nil, credit{}, false
		}
	}
	return dispatch, c, f.ok
}

// together is in the place of the dispatch on the subject of what is of several: RunnerWorkCredits, RunnerWorkFrames.
const together = "all"
