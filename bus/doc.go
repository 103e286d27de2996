// Package bus is how the parts of Runbus talk over NATS: a connection with an envelope around protobuf messages, the rule
// for answering a runner, and the numbered, acknowledged stream in which a runner returns a result.
//
// The two ends of a result are Sender (runner) and Receiver (waiting replica). Between them frames may be lost at a cut of
// either link and may come twice; the caller of Receiver.Next sees each once and in order.
package bus
