package bus

import (
	"strings"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// The envelope of every message: the short name of its type and the encoding of its body, as NATS headers.
const (
	HeaderType        = "Runbus-Type"
	HeaderContentType = "Content-Type"
	ContentType       = "application/protobuf"
)

// MaxPayload is the largest NATS message of the bus in bytes, headers included: the servers' max_payload.
const MaxPayload = 1 << 20

// ChunkBytes is the most a RunnerWorkChunk.arrow_ipc may hold.
const ChunkBytes = 512 << 10

// headerRoom is what the headers of the envelope may need of MaxPayload.
const headerRoom = 4 << 10

// NewMsg puts m into its envelope. A message that would not fit into MaxPayload is an error of CodeLimit.
func NewMsg(subject string, m proto.Message) (*nats.Msg, error) {
	body, err := proto.Marshal(m)
	if err != nil {
		return nil, schemas.Wrap(schemas.CodeInvalid, err, "a message for the bus can't be encoded")
	}
	name := shortName(m)
	if len(body) > MaxPayload-headerRoom {
		return nil, schemas.Errorf(schemas.CodeLimit, "%s of %d bytes is over the %d bytes of the bus", name, len(body), MaxPayload-headerRoom)
	}
	return &nats.Msg{
		Subject: subject,
		Header:  nats.Header{HeaderType: {name}, HeaderContentType: {ContentType}},
		Data:    body,
	}, nil
}

// TypeOf is the short name of the message's type as its header claims, for example `RunnerHello`; "" when it has none.
func TypeOf(msg *nats.Msg) string { return msg.Header.Get(HeaderType) }

// Decode reads the body of msg into a message of the type that the header names. A missing or another type, another
// content type, a body over MaxPayload and a body that is not protobuf are errors of CodeInvalid; into is not to be used then.
func Decode(msg *nats.Msg, into proto.Message) error {
	want, got := shortName(into), TypeOf(msg)
	if got == "" {
		return schemas.Errorf(schemas.CodeInvalid, "the message has no %s header", HeaderType)
	}
	if got != want {
		return schemas.Errorf(schemas.CodeInvalid, "the message is a %q, not a %s", clip(got), want)
	}
	if ct := msg.Header.Get(HeaderContentType); ct != "" && ct != ContentType {
		return schemas.Errorf(schemas.CodeInvalid, "the %s has content type %q, not %s", want, clip(ct), ContentType)
	}
	return unmarshal(want, msg.Data, into)
}

// DecodeAny reads a body of the named type, which is the short name of a message of runbus.v1. An unknown name and a body
// that Decode would refuse are errors of CodeInvalid.
func DecodeAny(typeName string, body []byte) (proto.Message, error) {
	unknown := schemas.Errorf(schemas.CodeInvalid, "%q is not a message of the bus", clip(typeName))
	if typeName == "" || strings.Contains(typeName, ".") {
		return nil, unknown
	}
	full := filePackage.Append(protoreflect.Name(typeName))
	mt, err := protoregistry.GlobalTypes.FindMessageByName(full)
	if err != nil {
		return nil, unknown
	}
	m := mt.New().Interface()
	if err := unmarshal(typeName, body, m); err != nil {
		return nil, err
	}
	return m, nil
}

// filePackage is the protobuf package of the contract; naming it also links the contract's types in.
var filePackage = (&runbusv1.RunnerHello{}).ProtoReflect().Descriptor().ParentFile().Package()

func unmarshal(name string, body []byte, into proto.Message) error {
	if len(body) > MaxPayload {
		return schemas.Errorf(schemas.CodeInvalid, "the %s has %d bytes, over the %d of the bus", name, len(body), MaxPayload)
	}
	if err := proto.Unmarshal(body, into); err != nil {
		return schemas.Wrap(schemas.CodeInvalid, err, "the body of the "+name+" is not valid protobuf")
	}
	return nil
}

func shortName(m proto.Message) string { return string(m.ProtoReflect().Descriptor().Name()) }

// clip shortens foreign text for an error message.
func clip(s string) string {
	const most = 80
	if len(s) > most {
		return s[:most] + "…"
	}
	return s
}
