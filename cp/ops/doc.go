// Package ops is what operators see with the stock `nats` CLI in account OPS: each replica as a NATS micro service, and
// copies of what it sends to runners.
//
// Both run on the connection of embedded.UserMicro, which may publish answers and copies in OPS and nothing else, so that
// this service may answer to the reply subject it is given: it is not on the bus that runners are on.
package ops
