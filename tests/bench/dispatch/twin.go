package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/proto"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const attachMethod = "/runbus.bench.Twin/Attach"

var attachDesc = grpc.StreamDesc{StreamName: "Attach", ServerStreams: true, ClientStreams: true}

// twin is the server of one gRPC stream that the runner's process opens: assignments go down, accepted and result come up,
// all multiplexed by dispatch id. Both answers are RunnerWorkChunk, numbers 1 and 2.
type twin struct {
	server   *grpc.Server
	addr     string
	attached chan struct{}
	stream   grpc.ServerStream
	send     sync.Mutex // SendMsg is for one goroutine at a time
	last     atomic.Uint64

	mu      sync.Mutex
	waiting map[string]chan *runbusv1.RunnerWorkChunk
}

func startTwin(certFile, keyFile string) (*twin, error) {
	cert, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // loopback, at once
	if err != nil {
		return nil, err
	}
	t := &twin{addr: l.Addr().String(), attached: make(chan struct{}), waiting: map[string]chan *runbusv1.RunnerWorkChunk{}}
	t.server = grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}})))
	t.server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "runbus.bench.Twin", HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{{StreamName: "Attach", ServerStreams: true, ClientStreams: true, Handler: func(_ any, s grpc.ServerStream) error {
			return t.attach(s)
		}}},
	}, t)
	go func() { _ = t.server.Serve(l) }() // stop ends it
	return t, nil
}

func (t *twin) stop() { t.server.Stop() }

// attach serves the one stream.
func (t *twin) attach(s grpc.ServerStream) error {
	t.stream = s
	close(t.attached)
	for {
		m := new(runbusv1.RunnerWorkChunk)
		if err := s.RecvMsg(m); err != nil {
			return err
		}
		t.mu.Lock()
		answers := t.waiting[m.GetDispatchId()]
		t.mu.Unlock()
		if answers != nil {
			answers <- m // has room for both
		}
	}
}

// dispatch is the twin's path.
func (t *twin) dispatch(ctx context.Context) (path, error) {
	select {
	case <-t.attached:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	template := assignment()
	return func(ctx context.Context) error {
		m := proto.CloneOf(template)
		m.DispatchId = "01JBENCHBENCHBENCH" + strconv.FormatUint(10_000_000+t.last.Add(1), 10)
		answers := make(chan *runbusv1.RunnerWorkChunk, 2)
		t.mu.Lock()
		t.waiting[m.DispatchId] = answers
		t.mu.Unlock()
		defer func() {
			t.mu.Lock()
			delete(t.waiting, m.DispatchId)
			t.mu.Unlock()
		}()
		t.send.Lock()
		err := t.stream.SendMsg(m)
		t.send.Unlock()
		if err != nil {
			return fmt.Errorf("gRPC: %w", err)
		}
		for seq := uint64(1); seq <= 2; seq++ {
			select {
			case a := <-answers:
				if a.GetSeq() != seq {
					return errors.New("gRPC: answers out of order")
				}
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return nil
	}, nil
}

// attachRunner is the runner's side: each assignment is answered by a goroutine of its own.
func attachRunner(ctx context.Context, addr string, config *tls.Config, result *atomic.Pointer[[]byte]) error {
	conn, err := grpc.NewClient(addr, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	s, err := conn.NewStream(ctx, &attachDesc, attachMethod)
	if err != nil {
		return err
	}
	var send sync.Mutex
	answer := func(m *runbusv1.RunnerWorkChunk) {
		send.Lock()
		defer send.Unlock()
		_ = s.SendMsg(m) // the end of the stream shows in RecvMsg
	}
	for {
		m := new(runbusv1.RunnerWorkAssignment)
		if err := s.RecvMsg(m); err != nil {
			return err
		}
		go func() {
			answer(&runbusv1.RunnerWorkChunk{DispatchId: m.GetDispatchId(), Session: m.GetSession(), Seq: 1})
			answer(&runbusv1.RunnerWorkChunk{DispatchId: m.GetDispatchId(), Session: m.GetSession(), Seq: 2, ArrowIpc: *result.Load()})
		}()
	}
}
