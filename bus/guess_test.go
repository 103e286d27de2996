package bus_test

import (
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/org-runink/runbus/bus"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Every body tells its type whichever of its own fields is the only one that is set.
func TestGuessIsRightForEveryMessage(t *testing.T) {
	for _, name := range bus.Travelling() {
		d := runbusv1.File_runbus_v1_work_proto.Messages().ByName(protoreflect.Name(name))
		if d == nil {
			d = runbusv1.File_runbus_v1_runner_proto.Messages().ByName(protoreflect.Name(name))
		}
		for i := range d.Fields().Len() {
			f := d.Fields().Get(i)
			empty, err := bus.DecodeAny(name, nil)
			if err != nil {
				t.Fatal(err)
			}
			m := empty.ProtoReflect()
			if common := d.Fields().ByNumber(1); common != nil {
				m.Set(common, protoreflect.ValueOfString("01J"))
			}
			set(m, f)
			body, err := proto.Marshal(m.Interface())
			if err != nil {
				t.Fatal(err)
			}
			got, back := bus.Guess(body)
			if f.Number() <= 10 {
				if back != nil {
					t.Errorf("%s with shared fields alone was taken for %s", name, got)
				}
				continue
			}
			if got != name || !proto.Equal(back, m.Interface()) {
				t.Errorf("%s with %s alone was taken for %q", name, f.Name(), got)
			}
		}
	}
	for _, body := range []string{"", "{}", "hello", "\x00", "\xff\xff"} {
		if name, m := bus.Guess([]byte(body)); m != nil {
			t.Errorf("%q was taken for %s", body, name)
		}
	}
}

// set gives a field a value that is not its zero.
func set(m protoreflect.Message, f protoreflect.FieldDescriptor) {
	switch {
	case f.IsList():
		l := m.Mutable(f).List()
		if f.Kind() == protoreflect.MessageKind {
			l.AppendMutable()
			return
		}
		l.Append(protoreflect.ValueOfString("x"))
	case f.Kind() == protoreflect.MessageKind:
		m.Mutable(f)
	case f.Kind() == protoreflect.StringKind:
		m.Set(f, protoreflect.ValueOfString("x"))
	case f.Kind() == protoreflect.BytesKind:
		m.Set(f, protoreflect.ValueOfBytes([]byte{1}))
	case f.Kind() == protoreflect.BoolKind:
		m.Set(f, protoreflect.ValueOfBool(true))
	case f.Kind() == protoreflect.EnumKind:
		m.Set(f, protoreflect.ValueOfEnum(1))
	case f.Kind() == protoreflect.DoubleKind:
		m.Set(f, protoreflect.ValueOfFloat64(1))
	case f.Kind() == protoreflect.Int32Kind:
		m.Set(f, protoreflect.ValueOfInt32(1))
	case f.Kind() == protoreflect.Int64Kind:
		m.Set(f, protoreflect.ValueOfInt64(1))
	case f.Kind() == protoreflect.Uint64Kind:
		m.Set(f, protoreflect.ValueOfUint64(1))
	}
}

func FuzzGuess(f *testing.F) {
	f.Add([]byte("\x0a\x03abc"))
	f.Fuzz(func(t *testing.T, body []byte) {
		if name, m := bus.Guess(body); m != nil && name == "" {
			t.Fatal("a message without a name")
		}
	})
}
