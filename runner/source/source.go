// Package source reads what a runner can reach (SPEC F1). It has the one interface of every connector, what connectors have
// in common (settings, limits, the dial hook, file roots, the SQL gate, redaction of secrets), and the Output they write
// record batches to. Connectors know nothing of the bus. Each kind has a folder of its own, and all of them pass
// sourcetest.Exercise.
package source

import (
	"context"
	"errors"
	"log/slog"
	"net"

	"github.com/apache/arrow-go/v18/arrow/memory"
)

// Connector reads one kind of source. It holds no state between fetches and is safe for concurrent use.
type Connector interface {
	// Kind is the connector's name in RunFetchRequest.source.kind.
	Kind() string

	// Fetch runs one read and writes its result to out: Start once, also for a result without rows, then Write for each
	// batch. It does not Close out. When Write returns ErrLimit it stops reading and returns nil. When ctx ends it stops
	// the read at the source, within a second, and returns an error. When it has returned, no connection, file or
	// goroutine of it is left (a connection may still be closing).
	//
	// Settings, secrets and query are checked before the source is touched (CodeBadSource, CodeReadOnly). Errors of the
	// source come back through Redact: in the source's own words, without a secret. Every connection goes through
	// env.Dial and every file through env.Roots.
	Fetch(ctx context.Context, env Env, req Request, out *Output) error
}

// Env is what a runner lends to a connector for one fetch.
type Env struct {
	// Dial opens every connection; GuardedDial makes one. Nil: a connector that dials refuses to work.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// Roots is where files may be read. Nil: nowhere.
	Roots *Roots
	// Log gets what is of interest to the runner's owner: never a secret, never a row. Nil: nothing is logged.
	Log *slog.Logger
	// Memory is where record batches are allocated. Nil: memory.DefaultAllocator.
	Memory memory.Allocator
}

// Allocator is Memory or the default.
func (e Env) Allocator() memory.Allocator {
	if e.Memory == nil {
		return memory.DefaultAllocator
	}
	return e.Memory
}

// Logger is Log or one that discards.
func (e Env) Logger() *slog.Logger {
	if e.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return e.Log
}

// Request is one read. Settings and Secrets have the names that the connector's Spec declares.
type Request struct {
	Settings map[string]string
	Secrets  map[string]string
	Query    string
}

// What one fetch may return at most (SPEC, issue 2). A fetch may ask for less, never for more.
const (
	DefaultMaxRows  int64 = 10_000_000
	DefaultMaxBytes int64 = 4 << 30
)

// A connector hands over a batch when it has reached BatchRows rows or BatchBytes Arrow bytes, whichever comes first: few
// large writes, and bounded memory.
const (
	BatchRows  = 16 << 10
	BatchBytes = 1 << 20
)

// Limits bound one result. Zero or less, or more than the default, means the default.
type Limits struct {
	MaxRows  int64 // rows
	MaxBytes int64 // Arrow bytes before compression
}

// Clamped is l with the defaults applied.
func (l Limits) Clamped() Limits {
	if l.MaxRows <= 0 || l.MaxRows > DefaultMaxRows {
		l.MaxRows = DefaultMaxRows
	}
	if l.MaxBytes <= 0 || l.MaxBytes > DefaultMaxBytes {
		l.MaxBytes = DefaultMaxBytes
	}
	return l
}

// ErrLimit tells a connector that the result is full: it stops reading and returns nil. The notice is there already.
var ErrLimit = errors.New("source: the result has reached its limit")
