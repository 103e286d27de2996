package bus

import (
	"slices"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// travelling are the messages that are bodies on the bus.
var travelling = []proto.Message{
	(*runbusv1.RunnerHello)(nil), (*runbusv1.EnrollmentAccepted)(nil), (*runbusv1.RunnerHeartbeat)(nil), (*runbusv1.RunnerGoodbye)(nil),
	(*runbusv1.RunnerControl)(nil), (*runbusv1.RunnerControlReply)(nil),
	(*runbusv1.RunnerWorkAssignment)(nil), (*runbusv1.RunnerWorkAssignments)(nil), (*runbusv1.RunnerWorkCredentials)(nil),
	(*runbusv1.RunnerWorkAccepted)(nil), (*runbusv1.RunnerWorkProgress)(nil), (*runbusv1.RunnerWorkChunk)(nil), (*runbusv1.RunnerWorkResult)(nil),
	(*runbusv1.RunnerWorkWhole)(nil), (*runbusv1.RunnerWorkFrames)(nil),
	(*runbusv1.RunnerWorkResume)(nil), (*runbusv1.RunnerWorkCredit)(nil), (*runbusv1.RunnerWorkCredits)(nil),
}

// sharedFields are the numbers that several messages use; all others belong to one message (schemas, fetch.proto).
const sharedFields = 10

// Guess finds the message of which body is one, by the numbers of its fields, for readers that have no header. It returns nil
// for anything else.
func Guess(body []byte) (name string, m proto.Message) {
	for _, t := range travelling {
		m := t.ProtoReflect().New()
		if proto.Unmarshal(body, m.Interface()) != nil || len(m.GetUnknown()) > 0 {
			continue
		}
		own := false
		m.Range(func(f protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
			own = f.Number() > sharedFields
			return !own
		})
		if own {
			return string(m.Descriptor().Name()), m.Interface()
		}
	}
	return "", nil
}

// Travelling are the short names of the messages that are bodies on the bus, sorted.
func Travelling() []string {
	names := make([]string, len(travelling))
	for i, t := range travelling {
		names[i] = string(t.ProtoReflect().Descriptor().Name())
	}
	slices.Sort(names)
	return names
}
