package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/klauspost/compress/s2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/org-runink/runbus/cmd/internal/process"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Every message of the contract can be named, empty and filled in, and comes out as its name and one line of JSON.
func TestDecodeKnowsEveryMessage(t *testing.T) {
	n := 0
	protoregistry.GlobalTypes.RangeMessages(func(mt protoreflect.MessageType) bool {
		d := mt.Descriptor()
		if d.ParentFile().Package() != (&runbusv1.RunnerHello{}).ProtoReflect().Descriptor().ParentFile().Package() || d.IsMapEntry() {
			return true
		}
		if _, nested := d.Parent().(protoreflect.MessageDescriptor); nested {
			return true
		}
		n++
		name := string(d.Name())
		m := mt.New()
		for i := range d.Fields().Len() {
			if f := d.Fields().Get(i); f.Kind() == protoreflect.StringKind && f.Cardinality() != protoreflect.Repeated && f.ContainingOneof() == nil {
				m.Set(f, protoreflect.ValueOfString(hostile))
			}
		}
		for _, filled := range []proto.Message{mt.New().Interface(), m.Interface()} {
			body, err := proto.Marshal(filled)
			if err != nil {
				t.Fatal(err)
			}
			text, err := decode(name, body)
			rest, ok := strings.CutPrefix(text, name+" ")
			if err != nil || !ok || !json.Valid([]byte(rest)) || strings.ContainsFunc(text, process.Steers) {
				t.Errorf("%s: %q %v", name, text, err)
			}
		}
		return true
	})
	if n < 12 {
		t.Errorf("%d messages", n)
	}
}

func TestDecodeWithoutAType(t *testing.T) {
	hello, err := proto.Marshal(&runbusv1.RunnerHello{RunnerId: "edge", Name: "Edge", Version: "v1", Capabilities: []string{"fetch"}})
	if err != nil {
		t.Fatal(err)
	}
	for body, want := range map[string]string{
		"": "(empty)", " \n": "(empty)", " {\r\n\"a\": 1} ": `{"a":1}`, "text\x1b[2J": "text·[2J", "\xff\xfe\x00": "(3 bytes that are no message of this version)",
		string(s2.EncodeSnappy(nil, []byte(`{"number":"1", "events":["`+strings.Repeat("\u009b", 1<<15)+`"]}`))): `{"number":"1","events":["` + strings.Repeat(`\u009b`, 1<<15) + `"]}`, // a batch of the audit
		string(hello): `RunnerHello {"runnerId":"edge","name":"Edge","version":"v1","capabilities":["fetch"]}`,
	} {
		if got, err := decode("", []byte(body)); err != nil || got != want {
			t.Errorf("%q: %q, want %q (%v)", body, got, want, err)
		}
	}
	for _, name := range []string{"Nope", "runbus.v1.RunnerHello ", ".."} {
		if got, err := decode(name, hello); err == nil {
			t.Errorf("%s: %s", name, got)
		}
	}
	if got, err := decode("RunnerHello", []byte("\xff\xfe")); err == nil {
		t.Errorf("garbage: %s", got)
	}
}

// Whatever is on the bus, ops' terminal is not steered and decode does not break off.
func FuzzDecode(f *testing.F) {
	for _, s := range []string{"", "{}", "\x0a\x04edge", "\xff", hostile} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		text, err := decode("", body)
		if err != nil || strings.ContainsFunc(strings.NewReplacer("\n", "", "\t", "").Replace(text), process.Steers) {
			t.Fatalf("%q: %q %v", body, text, err)
		}
	})
}
