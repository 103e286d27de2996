package bus_test

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus"
)

// A trace context is carried as it is, and dropped when it is too long to be one.
func TestTraceOfAMessage(t *testing.T) {
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	long := strings.Repeat("x", 600)
	for name, c := range map[string]struct {
		header nats.Header
		want   bus.Trace
	}{
		"none":       {nats.Header{}, bus.Trace{}},
		"parent":     {nats.Header{"traceparent": {parent}}, bus.Trace{Parent: parent}},
		"both":       {nats.Header{"traceparent": {parent}, "tracestate": {"a=b"}}, bus.Trace{Parent: parent, State: "a=b"}},
		"only state": {nats.Header{"tracestate": {"a=b"}}, bus.Trace{}},
		"long":       {nats.Header{"traceparent": {long}}, bus.Trace{}},
		"long state": {nats.Header{"traceparent": {parent}, "tracestate": {long}}, bus.Trace{Parent: parent}},
	} {
		if got := bus.TraceOf(&nats.Msg{Header: c.header}); got != c.want {
			t.Errorf("%s: %+v", name, got)
		}
	}
}
