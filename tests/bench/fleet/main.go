// Command fleet measures a control plane with thousands of runners on TLS links, all on this machine:
//
//   - how long they take from the first dial until all are connected and enrolled, against bare connections to a stock server;
//   - the control plane's memory for each, and its processor time for their heartbeats;
//   - how long they take to come back after the control plane was killed and started again on its data.
//
// The control plane is the product's, in a process of its own; the runners are the product's runner.Agent, whole, all in one
// other process. Nothing is asserted.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/org-runink/runbus/tests/bench/plane"
	"github.com/org-runink/runbus/tests/bench/proc"
)

// roles are what this program does when it is started again as a child.
var roles = map[string]func() error{
	plane.Role: func() error { return plane.Serve(nil) }, runnersRole: serveRunners, floorServerRole: serveFloorServer, floorClientsRole: serveFloorClients,
}

func main() {
	if len(os.Args) == 2 && roles[os.Args[1]] != nil {
		exit(roles[os.Args[1]]())
	}
	s := settings{out: proc.Out{W: os.Stdout}}
	flag.IntVar(&s.runners, "runners", 5000, "how many runners")
	flag.IntVar(&s.sites, "sites", 50, "service-account keys, shared out among the runners: one for each site or rollout")
	flag.IntVar(&s.together, "together", 128, "runners that are under way at once at the first start; what a restart brings is not held back")
	flag.IntVar(&s.repeat, "repeat", 1, "how often all of it is done")
	flag.IntVar(&s.beats, "beats", 1000, "heartbeats whose processor time is measured, at least")
	flag.DurationVar(&s.rest, "rest", 2*time.Minute, "how long the connected fleet is left alone before its memory is taken: the mean of the second half")
	flag.BoolVar(&s.floor, "floor", true, "measure bare connections too")
	flag.StringVar(&s.profile, "profile", "", "folder for profiles of the control plane and of the runners")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if _, err := proc.RaiseFiles(); err != nil {
		exit(err)
	}
	err := bench(ctx, s)
	stop()
	exit(err)
}

func exit(err error) {
	if err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, "fleet:", err)
		os.Exit(1)
	}
	os.Exit(0)
}
