package main

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/schemas"
)

var rawRef = schemas.RunnerRef{Tenant: tenant, Runner: rawID}

// raw is nc.Request on a connection like the dispatcher's, to a subscription on a connection like the runner's: the same
// users, so the server checks the same permissions. It writes as nats.go does by itself.
func (p *plane) raw(s sizes) (path, error) {
	inbox := schemas.ResultCtlSubject(rawRef, "raw", "inbox")
	nc, err := p.server.Connect(embedded.UserDispatch, nats.CustomInboxPrefix(inbox), nats.WriteBufferSize(nats.DefaultWriteBufSize))
	if err != nil {
		return nil, err
	}
	subject := schemas.WorkSubject(rawRef, "raw")
	payload := make([]byte, s.assignment)
	return func(ctx context.Context) error {
		msg, err := nc.Request(subject, payload, 10*time.Second)
		if err != nil {
			return fmt.Errorf("raw request: %w", err)
		}
		if len(msg.Data) != s.result {
			return fmt.Errorf("an answer of %d bytes", len(msg.Data))
		}
		return ctx.Err()
	}, nil
}
