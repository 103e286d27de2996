package ops

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
)

// ServiceName is what `nats micro ls` shows.
const ServiceName = "runbus"

// StatusSubject is where every replica answers with its Status: `nats req runbus.ops.status ” --replies 0`.
const StatusSubject = "runbus.ops.status"

// inboxes is where callers of the status endpoint wait; the server's permissions say the same.
const inboxes = "_INBOX."

// Status is what a replica says of itself, in JSON. Runners of other replicas are not counted in it.
type Status struct {
	Replica           string    `json:"replica"`
	Version           string    `json:"version"`
	StartedAt         time.Time `json:"startedAt"`
	UptimeSeconds     int64     `json:"uptimeSeconds"`
	RunnersConnected  int       `json:"runnersConnected"`
	DispatchesRunning int       `json:"dispatchesRunning"`
}

// ServiceConfig is what a replica shows of itself.
type ServiceConfig struct {
	Conn    *nats.Conn // of embedded.UserMicro
	Replica string     // the random id of this boot
	Version string     // semantic version; empty means 0.0.0
	// RunnersConnected and DispatchesRunning are asked at each status and each `nats micro stats`, from several goroutines
	// at once; they must not block.
	RunnersConnected  func() int
	DispatchesRunning func() int
	Log               *slog.Logger     // nil means slog.Default()
	Now               func() time.Time // nil means time.Now
}

// Service is a replica's micro service. Safe for concurrent use.
type Service struct {
	c       ServiceConfig
	started time.Time
	service micro.Service
}

// Serve registers the micro service and returns when the server knows its subscriptions. Serve itself answers; Stop ends it.
func Serve(c ServiceConfig) (*Service, error) {
	if c.Conn == nil || c.Replica == "" || c.RunnersConnected == nil || c.DispatchesRunning == nil {
		return nil, errors.New("micro service: connection, replica and the two counters are needed")
	}
	if c.Version == "" {
		c.Version = "0.0.0"
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	s := &Service{c: c, started: c.Now()}
	var err error
	s.service, err = micro.AddService(c.Conn, micro.Config{
		Name: ServiceName, Version: strings.TrimPrefix(c.Version, "v"),
		Description:  "Control plane of Runbus",
		Metadata:     map[string]string{"replica": c.Replica},
		StatsHandler: func(*micro.Endpoint) any { return s.Status() },
		ErrorHandler: func(_ micro.Service, err *micro.NATSError) {
			c.Log.Warn("micro service", "subject", err.Subject, "error", err.Description)
		},
	})
	if err != nil {
		return nil, fmt.Errorf("micro service: %w", err)
	}
	// No queue group: who asks wants to hear every replica.
	err = s.service.AddEndpoint("status", micro.HandlerFunc(s.answerStatus),
		micro.WithEndpointSubject(StatusSubject), micro.WithEndpointQueueGroupDisabled(),
		micro.WithEndpointMetadata(map[string]string{"answer": "JSON: replica, version, startedAt, uptimeSeconds, runnersConnected, dispatchesRunning"}))
	if err == nil {
		err = c.Conn.Flush()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("micro service: %w", err), s.service.Stop())
	}
	return s, nil
}

// Status is what the endpoint answers now.
func (s *Service) Status() Status {
	return Status{
		Replica: s.c.Replica, Version: s.c.Version,
		StartedAt: s.started.UTC(), UptimeSeconds: int64(s.c.Now().Sub(s.started).Seconds()),
		RunnersConnected: s.c.RunnersConnected(), DispatchesRunning: s.c.DispatchesRunning(),
	}
}

func (s *Service) answerStatus(r micro.Request) {
	if !strings.HasPrefix(r.Reply(), inboxes) {
		s.c.Log.Warn("micro service: a status request has no inbox as reply subject", "reply", r.Reply())
		return
	}
	if err := r.RespondJSON(s.Status()); err != nil {
		s.c.Log.Warn("micro service: answer a status request", "error", err)
	}
}

// Stop ends the service and leaves the connection open. A second call does nothing.
func (s *Service) Stop() error { return s.service.Stop() }
