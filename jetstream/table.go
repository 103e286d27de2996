package jetstream

import (
	"context"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"sort"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"
)

// Table is one bucket with values of type T, stored as JSON, or in their own form if T is an encoding.BinaryMarshaler and *T an
// encoding.BinaryUnmarshaler that keeps nothing of what it reads. It is safe for concurrent use.
//
// Reads come from the stream's leader; a read is what a decision starts from, and the compare-and-set of Create, Update and
// Delete is what makes it. In a bucket with expiry each write starts the time to live again.
//
// Errors: ErrNotFound, ErrLost, ErrUnknown, ErrUnavailable; a value that is no T is an error of its own.
type Table[T any] struct {
	s      *Store
	bucket Bucket
}

// TableOf is the table of one bucket. Two tables of one bucket must agree on T.
func TableOf[T any](s *Store, b Bucket) *Table[T] { return &Table[T]{s: s, bucket: b} }

// Row is one key with its value.
type Row[T any] struct {
	Key      string
	Value    T      // zero if Deleted
	Revision uint64 // what Update and Delete take
	Deleted  bool   // deleted or expired; only in changes
}

// Get reads one key from the leader; ErrNotFound if it is not there, deleted or expired.
func (t *Table[T]) Get(ctx context.Context, key string) (Row[T], error) {
	if err := validKey(key); err != nil {
		return Row[T]{}, err
	}
	e, err := t.s.last(ctx, t.bucket, key)
	if err != nil {
		return Row[T]{}, err
	}
	if e.deleted {
		return Row[T]{}, fmt.Errorf("get %s: %w", key, ErrNotFound)
	}
	return decodeRow[T](e)
}

// Create writes a key that is not there, or was deleted or expired, and returns its revision; ErrLost if it is there.
func (t *Table[T]) Create(ctx context.Context, key string, v T) (uint64, error) {
	rev, err := t.put(ctx, key, v, 0)
	for range createAttempts {
		if !errors.Is(err, ErrLost) {
			return rev, err
		}
		// Something stands there: a value, or what a deleted or expired one left behind.
		e, readErr := t.s.last(ctx, t.bucket, key)
		switch {
		case errors.Is(readErr, ErrNotFound): // the marker has gone in between
			rev, err = t.put(ctx, key, v, 0)
		case readErr != nil:
			return 0, readErr
		case !e.deleted:
			return 0, err
		default:
			rev, err = t.put(ctx, key, v, e.seq)
		}
	}
	return rev, err
}

// createAttempts bounds how often Create follows a marker that changes under its hands.
const createAttempts = 3

// Update writes a key that is at revision rev and returns its new revision; ErrLost if it is not at rev.
func (t *Table[T]) Update(ctx context.Context, key string, v T, rev uint64) (uint64, error) {
	if rev == 0 {
		return 0, fmt.Errorf("update %s: revision 0 is none: %w", key, ErrLost)
	}
	return t.put(ctx, key, v, rev)
}

// Delete deletes a key that is at revision rev; ErrLost if it is not at rev.
func (t *Table[T]) Delete(ctx context.Context, key string, rev uint64) error {
	if err := validKey(key); err != nil {
		return err
	}
	if rev == 0 {
		return fmt.Errorf("delete %s: revision 0 is none: %w", key, ErrLost)
	}
	h := nats.Header{}
	if t.s.defs[t.bucket.stream()].ttl > 0 {
		// A purge marker: when its own time is over the server removes it and leaves none behind.
		h.Set(headerOperation, operationPurge)
		h.Set(natsjs.MsgRollup, natsjs.MsgRollupSubject)
		h.Set(natsjs.MsgTTLHeader, markerTTL.String())
	} else {
		h.Set(headerOperation, operationDelete)
	}
	_, err := t.s.putKey(ctx, t.bucket, key, h, nil, rev)
	return err
}

// List reads all keys from the leader, sorted. A value that does not decode is an error.
func (t *Table[T]) List(ctx context.Context) ([]Row[T], error) {
	found, err := t.s.scan(ctx, t.bucket)
	if err != nil {
		return nil, err
	}
	rows := make([]Row[T], 0, len(found.entries))
	for _, e := range found.entries {
		if e.deleted {
			continue
		}
		row, err := decodeRow[T](e)
		if err != nil {
			return nil, err
		}
		rows = append(rows, row)
	}
	sort.Slice(rows, func(i, j int) bool { return rows[i].Key < rows[j].Key })
	return rows, nil
}

func (t *Table[T]) put(ctx context.Context, key string, v T, rev uint64) (uint64, error) {
	if err := validKey(key); err != nil {
		return 0, err
	}
	body, err := encodeValue(v)
	if err != nil {
		return 0, fmt.Errorf("encode %s: %w", key, err)
	}
	h := nats.Header{}
	if ttl := t.s.defs[t.bucket.stream()].ttl; ttl > 0 {
		h.Set(natsjs.MsgTTLHeader, ttl.String())
	}
	return t.s.putKey(ctx, t.bucket, key, h, body, rev)
}

func encodeValue[T any](v T) ([]byte, error) {
	if own, ok := any(v).(encoding.BinaryMarshaler); ok {
		return own.MarshalBinary()
	}
	return json.Marshal(v)
}

func decodeValue[T any](body []byte, v *T) error {
	if own, ok := any(v).(encoding.BinaryUnmarshaler); ok {
		return own.UnmarshalBinary(body)
	}
	return json.Unmarshal(body, v)
}

func decodeRow[T any](e entry) (Row[T], error) {
	row := Row[T]{Key: e.key, Revision: e.seq}
	if err := decodeValue(e.value, &row.Value); err != nil {
		return Row[T]{}, fmt.Errorf("the value of %s at revision %d does not decode: %w", e.key, e.seq, err)
	}
	return row, nil
}

// keyGrammar is the one of the stock `nats kv`, without a dot at either end.
var keyGrammar = regexp.MustCompile(`^[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*$`)

func validKey(key string) error {
	if len(key) > 512 || !keyGrammar.MatchString(key) {
		return fmt.Errorf("%q is not a key: letters, digits, - / _ = and single dots between them", key)
	}
	return nil
}

// Headers of a key-value bucket, as the stock clients write and read them.
const (
	headerOperation = "KV-Operation"
	operationDelete = "DEL"
	operationPurge  = "PURGE"
	headerMarker    = "Nats-Marker-Reason" // the server's own, after an expiry
)

// entry is one message of a bucket.
type entry struct {
	key     string
	value   []byte
	seq     uint64
	deleted bool
}

func (b Bucket) entry(subject string, h nats.Header, body []byte, seq uint64) entry {
	op := h.Get(headerOperation)
	return entry{
		key: strings.TrimPrefix(subject, b.prefix()), value: body, seq: seq,
		deleted: op == operationDelete || op == operationPurge || h.Get(headerMarker) != "",
	}
}

// putKey writes one key by compare-and-set.
func (s *Store) putKey(ctx context.Context, b Bucket, key string, h nats.Header, body []byte, rev uint64) (uint64, error) {
	subject := b.prefix() + key
	seq, err := s.commit(ctx, write{
		subject: subject, header: h, body: body,
		guard: natsjs.ExpectedLastSubjSeqHeader, expected: rev,
		standing: func(ctx context.Context) (*natsjs.RawStreamMsg, error) {
			m, err := s.stream(b.stream()).GetLastMsgForSubject(ctx, subject)
			if err != nil {
				return nil, readError("read "+key, err)
			}
			return m, nil
		},
	})
	if err != nil {
		return 0, fmt.Errorf("write %s to %s: %w", key, b, err)
	}
	return seq, nil
}

// last reads what stands under key from the leader, a marker too.
func (s *Store) last(ctx context.Context, b Bucket, key string) (entry, error) {
	var m *natsjs.RawStreamMsg
	if err := ask(ctx, askTimeout, func(ctx context.Context) (err error) {
		m, err = s.stream(b.stream()).GetLastMsgForSubject(ctx, b.prefix()+key)
		return err
	}); err != nil {
		return entry{}, readError(fmt.Sprintf("read %s from %s", key, b), err)
	}
	return b.entry(m.Subject, m.Header, m.Data, m.Sequence), nil
}

// scanned is a bucket as its leader had it: at least everything up to sequence last, perhaps some later writes too.
type scanned struct {
	at      time.Time // before the leader was asked
	created time.Time // of the stream: another one means another stream
	last    uint64
	keys    map[string]bool // all there are, markers too
	entries []entry         // those that were read
}

// scanParallel is how many reads of one scan are under way at once.
const scanParallel = 16

// scan reads a whole bucket from its leader.
func (s *Store) scan(ctx context.Context, b Bucket) (scanned, error) {
	return s.scanSome(ctx, b, func(string) bool { return true })
}

// scanSome asks the leader which keys a bucket has, and reads those that are wanted.
func (s *Store) scanSome(ctx context.Context, b Bucket, wanted func(key string) bool) (scanned, error) {
	found := scanned{}
	what := "scan " + string(b)
	var info *natsjs.StreamInfo
	if err := ask(ctx, askTimeout, func(ctx context.Context) error {
		found.at = time.Now()
		st, err := s.js.Stream(ctx, b.stream())
		if err == nil {
			info, err = st.Info(ctx, natsjs.WithSubjectFilter(b.prefix()+">"))
		}
		return err
	}); err != nil {
		return scanned{}, readError(what, err)
	}
	found.created, found.last = info.Created, info.State.LastSeq
	found.keys = make(map[string]bool, len(info.State.Subjects))
	var read []string
	for subject := range info.State.Subjects {
		key := strings.TrimPrefix(subject, b.prefix())
		found.keys[key] = true
		if wanted(key) {
			read = append(read, key)
		}
	}
	entries := make([]entry, len(read))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(scanParallel)
	for i, key := range read {
		group.Go(func() error {
			e, err := s.last(ctx, b, key)
			if errors.Is(err, ErrNotFound) {
				return nil // its marker has expired in between
			}
			entries[i] = e
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return scanned{}, fmt.Errorf("%s: %w", what, err)
	}
	for i, e := range entries {
		if e.seq > 0 {
			found.entries = append(found.entries, e)
		} else {
			delete(found.keys, read[i])
		}
	}
	return found, nil
}
