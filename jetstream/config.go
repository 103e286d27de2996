package jetstream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

// Bucket names one key-value bucket.
type Bucket string

// The buckets.
const (
	Identities Bucket = "runbus_identities" // file: service-account keys, sessions of people
	Known      Bucket = "runbus_known"      // file: outbound runners seen, and the key each id is bound to
	Heartbeats Bucket = "runbus_heartbeats" // memory, keys expire: the live runners
	Roster     Bucket = "runbus_registry"   // file: one document per tenant, its dialled runners and their tokens
	Leases     Bucket = "runbus_leases"     // memory, keys expire: which replica dials which runner
	Proofs     Bucket = "runbus_proofs"     // memory, keys expire: enrolment proof keys
	// SealingKeys is in memory, and its keys expire: what credentials of the live runners are sealed to. They are longer than all else that is held
	// of a runner, and don't change while it lives, so they are apart from its heartbeats.
	SealingKeys Bucket = "runbus_sealing_keys"
)

// Format is the format of data folders that this version makes: the number of the last change of the set of security streams, or of what is
// stored in them and an earlier version can't read. 1: identities, known, audit; 2: the registry as well; 3: packed batches in the audit.
const Format = 3

const (
	leaseTTL = 30 * time.Second
	// ProofTTL is how long a key of Proofs lives: as long as a ticket is valid (SPEC C3).
	ProofTTL = 15 * time.Minute
	// sealingTTL is only garbage collection: who finds no key asks its runner for it.
	sealingTTL = 24 * time.Hour
)

// stream is the name of the bucket's stream, as the stock `nats kv` expects it.
func (b Bucket) stream() string { return "KV_" + string(b) }

// prefix is what stands before a key in the subjects of the bucket.
func (b Bucket) prefix() string { return "$KV." + string(b) + "." }

const (
	auditStream  = "RUNBUS_AUDIT"
	auditSubject = "runbus.audit"
)

// maxAuditMessage bounds one message of the audit stream, headers included.
const maxAuditMessage = 512 << 10

// markerTTL is how long a deleted or expired key of a bucket with expiry leaves a marker behind: several rescans, so that
// a watch that was away for a moment still gets it.
const markerTTL = 5 * time.Minute

// definition is one stream as it must be.
type definition struct {
	config   natsjs.StreamConfig
	security bool          // created only in a fresh data folder, or in one of a format before since
	since    int           // the Format that brought a security stream
	ttl      time.Duration // each write expires after; zero: never
}

// definitions are all streams of account SEC.
//
// The audit stream is kept for ever: no age, count or size limit, no delete, no purge, no roll-up. An event has about 330 bytes on the disk,
// and 45 where many came at once, which cp/audit packs beforehand: S2 compression of the stream would come on top of copying and storing them.
// When JetStream's storage is full, appends fail, and with them what must be audited.
func definitions(o Options) []definition {
	bucket := func(b Bucket, storage natsjs.StorageType, about string) natsjs.StreamConfig {
		return natsjs.StreamConfig{
			Name: b.stream(), Description: about, Subjects: []string{b.prefix() + ">"},
			Retention: natsjs.LimitsPolicy, Discard: natsjs.DiscardNew,
			MaxConsumers: -1, MaxMsgs: -1, MaxBytes: -1, MaxMsgsPerSubject: 1, MaxMsgSize: -1,
			Storage: storage, Replicas: o.Replicas, Duplicates: 2 * time.Minute,
			DenyDelete: true, AllowRollup: true,
		}
	}
	expiring := func(b Bucket, about string) natsjs.StreamConfig {
		c := bucket(b, natsjs.MemoryStorage, about)
		c.AllowMsgTTL = true
		c.SubjectDeleteMarkerTTL = markerTTL
		return c
	}
	return []definition{
		{config: bucket(Identities, natsjs.FileStorage, "service-account keys, sessions of people"), security: true, since: 1},
		{config: bucket(Known, natsjs.FileStorage, "outbound runners seen"), security: true, since: 1},
		{config: bucket(Roster, natsjs.FileStorage, "dialled runners and their enrolment tokens"), security: true, since: 2},
		{config: expiring(Heartbeats, "live runners"), ttl: o.HeartbeatTTL},
		{config: expiring(Leases, "which replica dials which runner"), ttl: leaseTTL},
		{config: expiring(Proofs, "enrolment proof keys"), ttl: ProofTTL},
		{config: expiring(SealingKeys, "what credentials of live runners are sealed to"), ttl: sealingTTL},
		{security: true, since: 1, config: natsjs.StreamConfig{
			Name: auditStream, Description: "audit events, chained", Subjects: []string{auditSubject},
			Retention: natsjs.LimitsPolicy, Discard: natsjs.DiscardNew,
			MaxConsumers: -1, MaxMsgs: -1, MaxBytes: -1, MaxMsgsPerSubject: -1, MaxMsgSize: maxAuditMessage,
			Storage: natsjs.FileStorage, Replicas: o.Replicas, Duplicates: 2 * time.Minute,
			DenyDelete: true, DenyPurge: true,
		}},
		{config: natsjs.StreamConfig{
			Name: traceStream, Description: "timelines of dispatches", Subjects: []string{tracePrefix + ">"},
			Retention: natsjs.LimitsPolicy, Discard: natsjs.DiscardOld,
			MaxConsumers: -1, MaxMsgs: -1, MaxBytes: traceBytes, MaxAge: traceAge, MaxMsgsPerSubject: -1, MaxMsgSize: maxTraceMessage,
			Storage: natsjs.FileStorage, Replicas: o.Replicas, Duplicates: 2 * time.Minute,
			DenyDelete: true, DenyPurge: true,
		}},
	}
}

// ensure opens the stream of d, makes it when it is missing and may be made, and verifies its configuration: what can be
// changed into ours is changed, anything else is ErrDrift. created tells that it was made just now.
func ensure(ctx context.Context, js natsjs.JetStream, d definition, mayCreate bool) (st natsjs.Stream, created bool, err error) {
	name := d.config.Name
	st, err = js.Stream(ctx, name)
	if errors.Is(err, natsjs.ErrStreamNotFound) {
		if !mayCreate {
			return nil, false, fmt.Errorf("%w: %s; restore it from a backup of the data folder", ErrMissing, name)
		}
		st, err = js.CreateStream(ctx, d.config)
		if err == nil {
			return st, true, nil
		}
		if errors.Is(err, natsjs.ErrStreamNameAlreadyInUse) { // another replica, in between
			st, err = js.Stream(ctx, name)
		}
	}
	if err != nil {
		return nil, false, readError("open stream "+name, err)
	}
	fixable, fatal := drift(st.CachedInfo().Config, d.config)
	if len(fatal) > 0 {
		return nil, false, fmt.Errorf("%w: %s: %s", ErrDrift, name, strings.Join(fatal, "; "))
	}
	if len(fixable) == 0 {
		return st, false, nil
	}
	if st, err = js.UpdateStream(ctx, d.config); err != nil {
		return nil, false, fmt.Errorf("%w: %s: %s: %w", ErrDrift, name, strings.Join(fixable, "; "), err)
	}
	if fixable, fatal = drift(st.CachedInfo().Config, d.config); len(fixable)+len(fatal) > 0 {
		return nil, false, fmt.Errorf("%w: %s: %s", ErrDrift, name, strings.Join(append(fatal, fixable...), "; "))
	}
	return st, false, nil
}

// drift compares a stream with what it should be. What is fatal can't be changed on a stream that exists, or tells that it
// is not our stream.
func drift(have, want natsjs.StreamConfig) (fixable, fatal []string) {
	differ := func(into *[]string, what string, same bool, h, w any) {
		if !same {
			*into = append(*into, fmt.Sprintf("%s is %v, not %v", what, h, w))
		}
	}
	differ(&fatal, "storage", have.Storage == want.Storage, have.Storage, want.Storage)
	differ(&fatal, "retention", have.Retention == want.Retention, have.Retention, want.Retention)
	differ(&fatal, "subjects", slices.Equal(have.Subjects, want.Subjects), have.Subjects, want.Subjects)
	differ(&fatal, "mirror", (have.Mirror == nil) == (want.Mirror == nil), have.Mirror != nil, want.Mirror != nil)
	differ(&fatal, "number of sources", len(have.Sources) == 0, len(have.Sources), 0)
	differ(&fatal, "sealed", !have.Sealed, have.Sealed, false)
	differ(&fatal, "subject transform", have.SubjectTransform == nil, "set", "unset")
	differ(&fatal, "deny delete", want.DenyDelete || !have.DenyDelete, have.DenyDelete, want.DenyDelete)
	differ(&fatal, "deny purge", want.DenyPurge || !have.DenyPurge, have.DenyPurge, want.DenyPurge)
	differ(&fatal, "message TTL", want.AllowMsgTTL || !have.AllowMsgTTL, have.AllowMsgTTL, want.AllowMsgTTL)

	differ(&fixable, "deny delete", have.DenyDelete || !want.DenyDelete, have.DenyDelete, want.DenyDelete)
	differ(&fixable, "deny purge", have.DenyPurge || !want.DenyPurge, have.DenyPurge, want.DenyPurge)
	differ(&fixable, "message TTL", have.AllowMsgTTL || !want.AllowMsgTTL, have.AllowMsgTTL, want.AllowMsgTTL)
	differ(&fixable, "direct get", have.AllowDirect == want.AllowDirect, have.AllowDirect, want.AllowDirect)
	differ(&fixable, "republish", have.RePublish == nil, "set", "unset")
	differ(&fixable, "roll-up", have.AllowRollup == want.AllowRollup, have.AllowRollup, want.AllowRollup)
	differ(&fixable, "replicas", have.Replicas == want.Replicas, have.Replicas, want.Replicas)
	differ(&fixable, "discard", have.Discard == want.Discard, have.Discard, want.Discard)
	differ(&fixable, "history", have.MaxMsgsPerSubject == want.MaxMsgsPerSubject, have.MaxMsgsPerSubject, want.MaxMsgsPerSubject)
	differ(&fixable, "message limit", have.MaxMsgs == want.MaxMsgs, have.MaxMsgs, want.MaxMsgs)
	differ(&fixable, "byte limit", have.MaxBytes == want.MaxBytes, have.MaxBytes, want.MaxBytes)
	differ(&fixable, "age limit", have.MaxAge == want.MaxAge, have.MaxAge, want.MaxAge)
	differ(&fixable, "message size", have.MaxMsgSize == want.MaxMsgSize, have.MaxMsgSize, want.MaxMsgSize)
	differ(&fixable, "marker TTL", have.SubjectDeleteMarkerTTL == want.SubjectDeleteMarkerTTL, have.SubjectDeleteMarkerTTL, want.SubjectDeleteMarkerTTL)
	return fixable, fatal
}
