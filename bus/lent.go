package bus

import "github.com/nats-io/nats.go"

// lender is a message that lets a later one have the memory of its data, once nobody reads that any more. Large ones of nats.go are in a
// program that is built as `make build` builds (internal/smallstack); all others are left to the collector.
type lender interface{ Recycle() }

// lentBy is msg as a lender, if it is one and holds nothing but a chunk.
func lentBy(msg *nats.Msg, views []view) lender {
	if len(views) != 1 || views[0].field != chunkNumber {
		return nil
	}
	l, _ := any(msg).(lender)
	return l
}
