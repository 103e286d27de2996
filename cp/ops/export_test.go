package ops

import (
	"log/slog"

	"github.com/nats-io/nats.go"
)

// For tests: the bounds, and copies to something that can be made to wait.
const (
	CopiesQueued      = copiesQueued
	CopiesQueuedBytes = copiesQueuedBytes
)

func NewCopiesTo(publish func(*nats.Msg) error, log *slog.Logger) *Copies {
	return newCopies(publish, log)
}
