// Package jetstream holds every bucket and stream of the platform (account SEC) and their mirrors for operators (account
// OPS). A bucket is a stream in the shape of a NATS key-value bucket, so that the stock `nats kv` reads it; what differs
// from the client's own buckets is that every read comes from the stream's leader (direct get is off) and that every write
// is a compare-and-set.
//
// The package decides nothing about what it keeps: it offers typed tables with revisions (Table), a live copy of one
// (View), and the append-only audit stream.
package jetstream
