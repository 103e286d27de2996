// Package link is the wire of the connections that a control plane dials to a runner: TLS 1.3 between certificates of the runner
// CA, an ALPN that tells what the connection is for, and frames until it carries NATS. Both sides use it.
package link

// What a connection is for: its ALPN.
const (
	ProtoEnrol = "runbus-enrol/1" // ticket exchange, and the renewal of an expired leaf
	ProtoLink  = "runbus-link/1"  // preface, answer, then NATS
)
