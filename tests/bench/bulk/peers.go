package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"

	"github.com/apache/arrow-go/v18/arrow/flight"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/org-runink/runbus/runner"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/tests/bench/proc"
)

const (
	runnerRole = "runner"
	peersRole  = "peers"
	copyBlock  = 256 << 10
)

// serveRunner is the child with the product's runner, configured by the environment as ever, with the connector of this benchmark.
func serveRunner() error {
	defer rest()()
	cfg, err := runner.ConfigFromEnv(os.Getenv)
	if err != nil {
		return err
	}
	data := newRandom()
	cfg.FitProcessors = true // as core-runner does
	cfg.Connectors = func(string) (source.Connector, error) { return data, nil }
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	enrolled := make(chan struct{}, 1)
	cfg.OnEnrolled = func(runner.Enrolled) {
		select {
		case enrolled <- struct{}{}:
		default:
		}
	}
	agent, err := runner.New(cfg)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- agent.Run(ctx) }()
	select {
	case <-enrolled:
	case err := <-ended:
		return err
	}
	return proc.Serve(nil, map[string]proc.Command{
		"checksum": func(arg string) (any, error) { // of what a fetch of so many bytes must give
			n, err := strconv.ParseInt(arg, 10, 64)
			if err != nil {
				return nil, err
			}
			return checksumOf(data, n)
		},
	})
}

// addresses are those of the controls' servers.
type addresses struct{ Bare, Flight string }

// servePeers is the child with the sources of both controls.
func servePeers() error {
	defer rest()()
	cert, err := tls.LoadX509KeyPair(os.Getenv("BENCH_CERT"), os.Getenv("BENCH_KEY"))
	if err != nil {
		return err
	}
	config := &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}}
	bare, err := tls.Listen("tcp", "127.0.0.1:0", config)
	if err != nil {
		return err
	}
	go func() { _ = serveBare(bare) }()        // until the process ends
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // loopback, at once
	if err != nil {
		return err
	}
	s := grpc.NewServer(grpc.Creds(credentials.NewTLS(config)))
	flight.RegisterFlightServiceServer(s, &flightSource{data: newRandom()})
	go func() { _ = s.Serve(l) }()
	defer s.Stop()
	return proc.Serve(addresses{bare.Addr().String(), l.Addr().String()}, nil)
}

// serveBare answers each connection that says a number with so many bytes.
func serveBare(l net.Listener) error {
	block := make([]byte, copyBlock)
	_, _ = rand.Read(block) // does not fail
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer func() { _ = c.Close() }()
			var n int64
			if binary.Read(c, binary.LittleEndian, &n) != nil {
				return
			}
			for ; n > 0; n -= int64(len(block)) {
				if _, err := c.Write(block[:min(n, int64(len(block)))]); err != nil {
					return
				}
			}
		}()
	}
}

// flightSource is a Flight server with the same batches, uncompressed: they can't be made smaller.
type flightSource struct {
	flight.BaseFlightServer
	data *random
}

// DoGet sends as many bytes as the ticket says.
func (f *flightSource) DoGet(ticket *flight.Ticket, stream flight.FlightService_DoGetServer) error {
	n, err := strconv.ParseInt(string(ticket.GetTicket()), 10, 64)
	if err != nil {
		return err
	}
	w := flight.NewRecordWriter(stream, ipc.WithSchema(f.data.schema))
	for i := range n / batchBytes {
		if err := w.Write(f.data.batches[i%distinct]); err != nil {
			return errors.Join(err, w.Close())
		}
	}
	return w.Close()
}

// readBare reads n bytes from the bare server.
func readBare(addr string, config *tls.Config, n int64) (int64, error) {
	c, err := tls.Dial("tcp", addr, config) //nolint:noctx // loopback, at once
	if err != nil {
		return 0, err
	}
	defer func() { _ = c.Close() }()
	if err := binary.Write(c, binary.LittleEndian, n); err != nil {
		return 0, err
	}
	block := make([]byte, copyBlock)
	var got int64
	for {
		m, err := c.Read(block)
		got += int64(m)
		if errors.Is(err, io.EOF) {
			return got, nil
		}
		if err != nil {
			return got, fmt.Errorf("bare copy: %w", err)
		}
	}
}
