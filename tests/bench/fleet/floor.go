package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/schemas"
	"github.com/org-runink/runbus/tests/bench/proc"
)

// The floor: what the connections alone cost. A stock server with the same certificate and one static user, and bare nats.go
// connections that ask nothing.
const (
	floorServerRole  = "floor-server"
	floorClientsRole = "floor-clients"
	floorUser        = "bench"
)

// floorSetup is what both processes are told.
type floorSetup struct {
	Addr     string `json:"addr"`
	Cert     string `json:"cert"`
	Key      string `json:"key"`
	CA       string `json:"ca"`
	Count    int    `json:"count"`
	Together int    `json:"together"`
}

func floorSetupHere() (s floorSetup, err error) {
	err = json.Unmarshal([]byte(os.Getenv(setupFile)), &s)
	return s, err
}

func serveFloorServer() error {
	s, err := floorSetupHere()
	if err != nil {
		return err
	}
	opts := &server.Options{}
	if err := opts.ProcessConfigString(fmt.Sprintf(`listen: %q
tls { cert_file: %q, key_file: %q, min_version: "1.3", timeout: 2 }
authorization { user: %q, password: %q }`, s.Addr, s.Cert, s.Key, floorUser, floorUser)); err != nil {
		return err
	}
	opts.NoSigs, opts.NoLog = true, true
	ns, err := server.NewServer(opts)
	if err != nil {
		return err
	}
	ns.Start()
	if !ns.ReadyForConnections(10 * time.Second) {
		return errors.New("the floor's server does not listen")
	}
	err = proc.Serve(nil, nil)
	ns.Shutdown()
	ns.WaitForShutdown()
	return err
}

func serveFloorClients() error {
	s, err := floorSetupHere()
	if err != nil {
		return err
	}
	return proc.Serve(nil, map[string]proc.Command{
		"connect": func(string) (any, error) { return floorConnect(s) },
	})
}

// floorConnect makes the connections and returns how long that took.
func floorConnect(s floorSetup) (time.Duration, error) {
	began := time.Now()
	failed := make(chan error, s.Count)
	slots := make(chan struct{}, s.Together)
	var all sync.WaitGroup
	for range s.Count {
		slots <- struct{}{}
		all.Go(func() {
			_, err := nats.Connect("tls://"+s.Addr, nats.RootCAs(s.CA), nats.UserInfo(floorUser, floorUser), nats.Name(schemas.NewID()),
				nats.Timeout(20*time.Second))
			if err != nil {
				failed <- err
			}
			<-slots
		})
	}
	all.Wait()
	took := time.Since(began)
	select {
	case err := <-failed:
		return took, err
	default:
		return took, nil
	}
}
