package jetstream

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
)

// mirrored are the streams that operators see a copy of, in account OPS under the same name.
var mirrored = []string{Heartbeats.stream(), auditStream, traceStream}

const (
	// mirrorConsumer is the consumer in SEC that feeds a mirror. It is made here, since who makes a consumer picks where it
	// delivers to; account OPS may only reset it and acknowledge its flow control.
	mirrorConsumer = "ops"
	// mirrorPrefix and the stream's name is where it delivers.
	mirrorPrefix = "runbus.mirror."
	// mirrorAPI stands in OPS for the `$JS.API` of SEC.
	mirrorAPI = "runbus.sec"
	// metaSource in a mirror's metadata tells which making of its source it copies.
	metaSource = "runbus.source-created"
	// mirrorPending is how many messages may be under way to a mirror between two acknowledgements of flow control.
	mirrorPending = 1000
)

// OpenMirrors makes the mirrors of heartbeats, audit and trace over a connection in account OPS, and has the store keep them: a
// mirror whose source was made again (it would stay wrong in silence), or whose last sequence is above its source's, is
// deleted and made again, looked for every 30 s, after a reconnect, and when a memory bucket was made again.
func (s *Store) OpenMirrors(ctx context.Context, mirror *nats.Conn) error {
	ops, err := natsjs.New(mirror, natsjs.WithDefaultTimeout(askTimeout))
	if err != nil {
		return fmt.Errorf("open JetStream of the mirrors: %w", err)
	}
	for _, name := range mirrored {
		if err := s.mirror(ctx, ops, name); err != nil {
			return err
		}
	}
	s.mu.Lock()
	s.ops = ops
	s.mu.Unlock()
	s.lookNow()
	return nil
}

// mirror makes the consumer and the mirror of one stream as they must be, in this order: a mirror that doesn't find its
// consumer waits for half a minute.
func (s *Store) mirror(ctx context.Context, ops natsjs.JetStream, name string) error {
	s.mirrors.Lock()
	defer s.mirrors.Unlock()
	ctx, cancel := context.WithTimeout(ctx, 4*askTimeout)
	defer cancel()
	// The mirror is read before its source: it can't be ahead then, unless it is wrong.
	copied, err := ops.Stream(ctx, name)
	if err != nil && !errors.Is(err, natsjs.ErrStreamNotFound) {
		return readError("read mirror "+name, err)
	}
	there := err == nil
	source, err := s.js.Stream(ctx, name)
	if err != nil {
		return readError("read the source of mirror "+name, err)
	}
	want := s.mirrorConfig(name, source.CachedInfo().Created)
	fresh, err := s.feed(ctx, name, there)
	if err != nil {
		return err
	}
	if there {
		why := wrongMirror(copied.CachedInfo(), source.CachedInfo(), want)
		if why == "" && fresh {
			why = "its consumer was gone"
		}
		if why == "" {
			return nil
		}
		s.o.Log.Warn("mirror is made again", "stream", name, "because", why)
		if err := ops.DeleteStream(ctx, name); err != nil && !errors.Is(err, natsjs.ErrStreamNotFound) {
			return readError("delete mirror "+name, err)
		}
		if !fresh { // it must deliver from the start again
			if err := s.js.DeleteConsumer(ctx, name, mirrorConsumer); err != nil && !errors.Is(err, natsjs.ErrConsumerNotFound) {
				return readError("delete the consumer of mirror "+name, err)
			}
			if _, err := s.feed(ctx, name, false); err != nil {
				return err
			}
		}
	}
	if _, err := ops.CreateStream(ctx, want); err != nil {
		return readError("make mirror "+name, err)
	}
	s.o.Log.Info("mirror made", "stream", name)
	return nil
}

// wrongMirror says why a mirror can't go on, "" if it can.
func wrongMirror(copied, source *natsjs.StreamInfo, want natsjs.StreamConfig) string {
	have := copied.Config
	switch {
	case copied.State.LastSeq > source.State.LastSeq:
		return fmt.Sprintf("its last sequence %d is above its source's %d", copied.State.LastSeq, source.State.LastSeq)
	case have.Metadata[metaSource] != want.Metadata[metaSource]:
		return "its source was made again"
	case have.Mirror == nil || have.Mirror.Consumer == nil || *have.Mirror.Consumer != *want.Mirror.Consumer ||
		have.Mirror.External == nil || have.Mirror.External.APIPrefix != want.Mirror.External.APIPrefix:
		return "it copies from elsewhere"
	case have.Storage != want.Storage || have.PersistMode != want.PersistMode || have.AllowDirect || have.MaxMsgsPerSubject != want.MaxMsgsPerSubject ||
		have.AllowMsgTTL != want.AllowMsgTTL || have.Replicas != want.Replicas:
		return "it is configured differently"
	}
	return ""
}

// feed makes sure that the consumer is there; fresh tells that it delivers from the start. One that is
// configured otherwise, and, if there is no mirror, one that has delivered already, is made again.
func (s *Store) feed(ctx context.Context, name string, mirrorThere bool) (fresh bool, err error) {
	have, err := s.js.PushConsumer(ctx, name, mirrorConsumer)
	switch {
	case errors.Is(err, natsjs.ErrConsumerNotFound):
	case errors.Is(err, natsjs.ErrNotPushConsumer):
	case err != nil:
		return false, readError("read the consumer of mirror "+name, err)
	default:
		info := have.CachedInfo()
		ours := info.Config.DeliverSubject == mirrorPrefix+name && info.Config.AckPolicy == natsjs.AckFlowControlPolicy &&
			info.Config.DeliverPolicy == natsjs.DeliverAllPolicy && info.Config.FilterSubject == "" && !info.Config.HeadersOnly
		if ours && (mirrorThere || info.Delivered.Stream == 0) {
			return false, nil
		}
	}
	if !errors.Is(err, natsjs.ErrConsumerNotFound) {
		if err := s.js.DeleteConsumer(ctx, name, mirrorConsumer); err != nil && !errors.Is(err, natsjs.ErrConsumerNotFound) {
			return false, readError("delete the consumer of mirror "+name, err)
		}
	}
	_, err = s.js.CreatePushConsumer(ctx, name, natsjs.ConsumerConfig{
		Durable: mirrorConsumer, Description: "feeds the mirror in account OPS",
		DeliverSubject: mirrorPrefix + name, DeliverPolicy: natsjs.DeliverAllPolicy,
		AckPolicy: natsjs.AckFlowControlPolicy, FlowControl: true, IdleHeartbeat: time.Second, MaxAckPending: mirrorPending,
	})
	if err != nil && !errors.Is(err, natsjs.ErrConsumerExists) {
		return false, readError("make the consumer of mirror "+name, err)
	}
	return true, nil
}

// mirrorConfig is the mirror of one stream. It honours the expiry of its source's messages by itself, so that operators
// don't see a dead runner even while the mirror is cut off.
func (s *Store) mirrorConfig(name string, sourceCreated time.Time) natsjs.StreamConfig {
	source := s.defs[name].config
	// A mirror need not be on the disk before it goes on: what it loses when the power fails it gets again from its source. A stream with
	// replicas has no such mode.
	persist := natsjs.DefaultPersistMode
	if source.Storage == natsjs.FileStorage && source.Replicas <= 1 {
		persist = natsjs.AsyncPersistMode
	}
	return natsjs.StreamConfig{
		Name: name, Description: "mirror for operators: " + source.Description,
		Retention: natsjs.LimitsPolicy, Discard: natsjs.DiscardOld,
		MaxConsumers: -1, MaxMsgs: -1, MaxBytes: source.MaxBytes, MaxAge: source.MaxAge, MaxMsgsPerSubject: source.MaxMsgsPerSubject, MaxMsgSize: -1,
		Storage: source.Storage, PersistMode: persist, Replicas: source.Replicas, Compression: source.Compression,
		AllowMsgTTL: source.AllowMsgTTL, DenyDelete: true, DenyPurge: true,
		Mirror: &natsjs.StreamSource{
			Name:     name,
			External: &natsjs.ExternalStream{APIPrefix: mirrorAPI},
			Consumer: &natsjs.StreamConsumerSource{Name: mirrorConsumer, DeliverSubject: mirrorPrefix + name},
		},
		Metadata: map[string]string{metaSource: sourceCreated.UTC().Format(time.RFC3339Nano)},
	}
}
