package main

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/org-runink/runbus/tests/bench/plane"
	"github.com/org-runink/runbus/tests/bench/proc"
)

const (
	callerRole = "caller"
	callerFile = "BENCH_CALLER"
	runnerID   = "bulk"
)

// reach is what the caller is told: where everything is.
type reach struct {
	URL, Token, CA string
	Peers          addresses
}

// took is one result at the caller.
type took struct {
	Bytes   int64         `json:"bytes"` // Arrow bytes; of the bare copy: bytes
	Elapsed time.Duration `json:"elapsed"`
	Sum     string        `json:"sum,omitempty"`
}

// serveCaller is the child that reads the results: the product's by HTTP, as any caller, and the controls'.
func serveCaller() error {
	defer rest()()
	var r reach
	body, err := os.ReadFile(os.Getenv(callerFile)) //nolint:gosec // its parent says where
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, &r); err != nil {
		return err
	}
	pem, err := os.ReadFile(r.CA)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	config := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: roots}
	timed := func(read func(n int64, sum hash.Hash) (int64, error)) proc.Command {
		return func(arg string) (any, error) {
			var n int64
			var check bool
			if _, err := fmt.Sscan(arg, &n, &check); err != nil {
				return nil, err
			}
			var sum hash.Hash
			if check {
				sum = sha256.New()
			}
			began := time.Now()
			got, err := read(n, sum)
			t := took{Bytes: got, Elapsed: time.Since(began)}
			if err == nil && got < n {
				err = fmt.Errorf("%d bytes of %d arrived", got, n)
			}
			if sum != nil {
				t.Sum = hex.EncodeToString(sum.Sum(nil))
			}
			return t, err
		}
	}
	return proc.Serve(nil, map[string]proc.Command{
		"product": timed(r.product),
		"flight":  timed(func(n int64, sum hash.Hash) (int64, error) { return readFlight(r.Peers.Flight, config, n, sum) }),
		"bare":    timed(func(n int64, _ hash.Hash) (int64, error) { return readBare(r.Peers.Bare, config, n) }),
	})
}

// product makes a fetch and reads its record batches.
func (r reach) product(n int64, sum hash.Hash) (int64, error) {
	body, err := json.Marshal(map[string]any{
		"runnerId": runnerID, "source": map[string]any{"kind": kind, "settings": map[string]string{}}, "query": strconv.FormatInt(n, 10),
	})
	if err != nil {
		return 0, err
	}
	resp, err := plane.Send(context.Background(), r.URL, r.Token, http.MethodPost, "/api/fetches", body, "application/vnd.apache.arrow.stream")
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return 0, errors.New(resp.Status)
	}
	reader, err := ipc.NewReader(resp.Body)
	if err != nil {
		return 0, err
	}
	defer reader.Release()
	got, err := readAll(reader, sum)
	if err == nil {
		_, err = io.Copy(io.Discard, resp.Body) // the trailers come behind the end
	}
	if outcome := resp.Trailer.Get("Runbus-Outcome"); err == nil && outcome != "completed" {
		err = fmt.Errorf("the fetch ended as %q: %s", outcome, resp.Trailer.Get("Runbus-Error"))
	}
	return got, err
}

// batches is a reader of either kind.
type batches interface {
	Next() bool
	RecordBatch() arrow.RecordBatch
	Err() error
}

func readAll(r batches, sum hash.Hash) (n int64, err error) {
	for r.Next() {
		batch := r.RecordBatch()
		n += batch.NumRows() * batch.NumCols() * 8
		if sum != nil {
			if err := addTo(sum, batch); err != nil {
				return n, err
			}
		}
	}
	return n, r.Err()
}

func readFlight(addr string, config *tls.Config, n int64, sum hash.Hash) (_ int64, err error) {
	c, err := flight.NewClientWithMiddleware(addr, nil, nil, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	stream, err := c.DoGet(context.Background(), &flight.Ticket{Ticket: []byte(strconv.FormatInt(n, 10))})
	if err != nil {
		return 0, err
	}
	reader, err := flight.NewRecordReader(stream)
	if err != nil {
		return 0, err
	}
	defer reader.Release()
	return readAll(reader, sum)
}

// checksumOf is the checksum of n bytes of the connector's.
func checksumOf(r *random, n int64) (string, error) {
	sum := sha256.New()
	for i := range n / batchBytes {
		if err := addTo(sum, r.batches[i%distinct]); err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// rest has the collector rest as in the product's programs (cmd/internal/process).
func rest() (release func()) {
	floor := make([]byte, 32<<20)
	return func() { runtime.KeepAlive(floor) }
}
