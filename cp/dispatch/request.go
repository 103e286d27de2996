package dispatch

import (
	"errors"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// A caller's request is measured and written by hand, as the assignment is that it stands in: with settings, protobuf's tables take 2.7 times as long
// (measured), and would write the caller's limits, not those that hold.

// Numbers of the fields of RunFetchRequest, of Source, and of an entry of its settings.
const (
	fieldSource, fieldQuery     = 1, 2
	fieldMaxRows, fieldMaxBytes = 3, 4
	fieldKind, fieldSettings    = 1, 2
	fieldKey, fieldValue        = 1, 2
	tagSize                     = 1 // of a field whose number is under 16
)

var errNotText = errors.New("a text in it is not UTF-8")

// sized is what a request takes encoded, with the limits that hold instead of its own. Fields of a later version go on as they came.
type sized struct {
	rows, bytes            int64
	all, source            int
	unknown, sourceUnknown []byte
}

// measure measures a request.
func measure(f *runbusv1.RunFetchRequest) sized {
	m := sized{
		rows: limit(f.GetMaxRows(), MaxRows), bytes: limit(f.GetMaxBytes(), MaxBytes), unknown: f.ProtoReflect().GetUnknown(),
	}
	m.all = len(m.unknown) + textSize(f.GetQuery()) + numberSize(m.rows) + numberSize(m.bytes)
	if s := f.GetSource(); s != nil {
		m.sourceUnknown = s.ProtoReflect().GetUnknown()
		m.source = len(m.sourceUnknown) + textSize(s.GetKind())
		for name, value := range s.GetSettings() {
			m.source += tagSize + protowire.SizeBytes(settingSize(name, value))
		}
		m.all += tagSize + protowire.SizeBytes(m.source)
	}
	return m
}

// append appends the request that m is of.
func (m *sized) append(b []byte, f *runbusv1.RunFetchRequest) (_ []byte, err error) {
	if s := f.GetSource(); s != nil {
		b = protowire.AppendTag(b, fieldSource, protowire.BytesType)
		if b, err = m.appendSource(protowire.AppendVarint(b, uint64(m.source)), s); err != nil {
			return nil, err
		}
	}
	if b, err = appendChecked(b, fieldQuery, f.GetQuery()); err != nil {
		return nil, err
	}
	b = appendNumber(appendNumber(b, fieldMaxRows, m.rows), fieldMaxBytes, m.bytes)
	return append(b, m.unknown...), nil
}

func (m *sized) appendSource(b []byte, s *runbusv1.Source) (_ []byte, err error) {
	if b, err = appendChecked(b, fieldKind, s.GetKind()); err != nil {
		return nil, err
	}
	for name, value := range s.GetSettings() {
		b = protowire.AppendTag(b, fieldSettings, protowire.BytesType)
		b = protowire.AppendVarint(b, uint64(settingSize(name, value)))
		if b, err = appendChecked(b, fieldKey, name); err != nil {
			return nil, err
		}
		if b, err = appendChecked(b, fieldValue, value); err != nil {
			return nil, err
		}
	}
	return append(b, m.sourceUnknown...), nil
}

func settingSize(name, value string) int { return textSize(name) + textSize(value) }

// textSize is the size of a text in a field whose number is under 16; an empty one is left out.
func textSize(text string) int {
	if text == "" {
		return 0
	}
	return tagSize + protowire.SizeBytes(len(text))
}

func numberSize(n int64) int { return tagSize + protowire.SizeVarint(uint64(n)) }

// appendChecked appends a text that is not empty, unless it is not UTF-8.
func appendChecked(b []byte, field protowire.Number, text string) ([]byte, error) {
	switch {
	case text == "":
		return b, nil
	case !utf8.ValidString(text):
		return nil, errNotText
	}
	return appendText(b, field, text), nil
}
