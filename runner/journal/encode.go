package journal

import (
	"encoding/json"
	"errors"
	"strconv"
	"time"
)

// appendBody appends what encoding/json makes of a record with that prev, without the last brace. By hand, since two records a fetch
// are written, and most of what they cost was this.
func appendBody(b []byte, r *Record, prev []byte) ([]byte, error) {
	if y := r.At.Year(); y < 0 || y > 9999 {
		return nil, errors.New("the clock tells a year that a record can't have")
	}
	b = strconv.AppendUint(append(b, `{"seq":`...), r.Seq, 10)
	b = append(append(append(b, `,"prev":"`...), prev...), '"')
	b = append(r.At.AppendFormat(append(b, `,"at":"`...), time.RFC3339Nano), '"')
	b = appendText(append(b, `,"event":`...), r.Event)
	b = textField(b, `,"dispatch":`, r.Dispatch)
	b = textField(b, `,"tenant":`, r.Tenant)
	b = textField(b, `,"runner":`, r.Runner)
	if c := r.Caller; c != nil {
		b = appendText(append(b, `,"caller":{"tenant":`...), c.Tenant)
		b = appendText(append(b, `,"person":`...), c.Person)
		b = append(appendText(append(b, `,"role":`...), c.Role), '}')
	}
	b = textField(b, `,"kind":`, r.Kind)
	b = textField(b, `,"target":`, r.Target)
	if q := r.Query; q != nil {
		b = appendText(append(b, `,"query":{"word":`...), q.Word)
		b = appendText(append(b, `,"sha256":`...), q.SHA256)
		b = append(textField(b, `,"text":`, q.Text), '}')
	}
	b = textField(b, `,"policy":`, r.Policy)
	b = textField(b, `,"outcome":`, r.Outcome)
	b = textField(b, `,"reason":`, r.Reason)
	b = listField(b, `,"rules":`, r.Rules)
	b = listField(b, `,"dialled":`, r.Dialled)
	b = numberField(b, `,"rows":`, r.Rows)
	b = numberField(b, `,"bytes":`, r.Bytes)
	b = numberField(b, `,"bytesOut":`, r.BytesOut)
	b = numberField(b, `,"durationMs":`, r.DurationMS)
	b = numberField(b, `,"droppedBytes":`, r.DroppedBytes)
	return textField(b, `,"droppedSha256":`, r.DroppedSHA256), nil
}

// The fields are left out when they are empty.

func textField(b []byte, name, value string) []byte {
	if value == "" {
		return b
	}
	return appendText(append(b, name...), value)
}

func listField(b []byte, name string, values []string) []byte {
	if len(values) == 0 {
		return b
	}
	b = append(b, name...)
	for i, v := range values {
		separator := byte(',')
		if i == 0 {
			separator = '['
		}
		b = appendText(append(b, separator), v)
	}
	return append(b, ']')
}

func numberField(b []byte, name string, value int64) []byte {
	if value == 0 {
		return b
	}
	return strconv.AppendInt(append(b, name...), value, 10)
}

// appendText appends a string of JSON.
func appendText(b []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' || c == '<' || c == '>' || c == '&' {
			quoted, err := json.Marshal(s)
			if err != nil {
				panic(err) // of a string, there is none
			}
			return append(b, quoted...)
		}
	}
	return append(append(append(b, '"'), s...), '"')
}
