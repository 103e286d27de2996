package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/apache/arrow-go/v18/arrow/ipc"

	"github.com/org-runink/runbus/cp"
	"github.com/org-runink/runbus/cp/dispatch"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
	"github.com/org-runink/runbus/tests/bench/plane"
	"github.com/org-runink/runbus/tests/bench/proc"
)

// servePlane is the child with the control plane, which reads results itself when told: "inside N CHECK".
func servePlane() error {
	return plane.Serve(func(c *cp.ControlPlane) map[string]proc.Command {
		return map[string]proc.Command{"inside": func(arg string) (any, error) {
			var n int64
			var check bool
			if _, err := fmt.Sscan(arg, &n, &check); err != nil {
				return nil, err
			}
			return inside(c, n, check)
		}}
	})
}

// inside is a caller within the control plane's process: it takes the result from the dispatcher and reads its record batches.
func inside(c *cp.ControlPlane, n int64, check bool) (took, error) {
	token, err := os.ReadFile(c.Endpoints().AdminToken)
	if err != nil {
		return took{}, err
	}
	began := time.Now()
	from, to := io.Pipe()
	read := make(chan error, 1)
	var got int64
	var sum hash.Hash
	if check {
		sum = sha256.New()
	}
	go func() {
		defer func() { _ = from.Close() }()
		reader, err := ipc.NewReader(from)
		if err == nil {
			got, err = readAll(reader, sum)
			reader.Release()
			_, drained := io.Copy(io.Discard, from)
			if err == nil {
				err = drained
			}
		}
		read <- err
	}()
	o, err := c.Fetch(context.Background(), strings.TrimSpace(string(token)), dispatch.Request{
		Runner: runnerID, Fetch: &runbusv1.RunFetchRequest{Source: &runbusv1.Source{Kind: kind}, Query: strconv.FormatInt(n, 10)},
	}, insideSink{to})
	_ = to.Close() // never fails
	if failed := <-read; err == nil && failed != nil {
		err = failed
	}
	if err == nil && o.Code != dispatch.OutcomeCompleted {
		err = fmt.Errorf("%s: %w", o.Code, o.Err)
	}
	t := took{Bytes: got, Elapsed: time.Since(began)}
	if sum != nil {
		t.Sum = hex.EncodeToString(sum.Sum(nil))
	}
	return t, err
}

// insideSink hands the chunks to who reads them.
type insideSink struct{ to *io.PipeWriter }

// Accepted takes no notice.
func (s insideSink) Accepted(dispatch.Accepted) error { return nil }

// Progress takes no notice.
func (s insideSink) Progress(*runbusv1.RunFetchUpdate) error { return nil }

// Chunk waits until the reader has taken all of b.
func (s insideSink) Chunk(b []byte) error {
	_, err := s.to.Write(b)
	return err
}

// Abandon takes no notice: the reader never stops for long.
func (s insideSink) Abandon() {}
