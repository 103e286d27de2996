// Command bulk measures how fast one large result comes, and what memory that takes: from a connector in the runner's memory,
// over TLS 1.3 to the control plane, to a caller who reads its record batches. In one run, in turns:
//
//   - inside: control plane with embedded server, and runner; the caller is in the control plane's process and takes the result from the
//     dispatcher, as the API does: two processes;
//   - product: the caller is a third process, and is answered by HTTP on loopback;
//   - flight: Arrow Flight (arrow-go, gRPC over TLS 1.3), DoGet of the same batches, uncompressed: two processes;
//   - bare: as many bytes over one TLS 1.3 connection: two processes.
//
// The product's stream has the compression it always has (zstd, fastest level, left out where it gains nothing); the numbers are
// random, so that it gains nothing. It prints MB/s, and medians of the ratios of neighbours in time. Nothing is asserted.
package main

import (
	"flag"
	"fmt"
	"os"

	"github.com/org-runink/runbus/tests/bench/plane"
	"github.com/org-runink/runbus/tests/bench/proc"
)

var roles = map[string]func() error{
	plane.Role: servePlane, runnerRole: serveRunner, peersRole: servePeers, callerRole: serveCaller,
}

func main() {
	if len(os.Args) == 2 && roles[os.Args[1]] != nil {
		exit(roles[os.Args[1]]())
	}
	s := settings{out: proc.Out{W: os.Stdout}}
	mib := flag.Int64("mib", 1024, "size of the result, MiB")
	flag.IntVar(&s.pairs, "pairs", 7, "how often each is measured")
	flag.StringVar(&s.profile, "profile", "", "folder for CPU profiles of the product's processes")
	flag.StringVar(&s.profiled, "profiled", "product", "path that is profiled: product, inside")
	flag.Parse()
	s.bytes = *mib << 20
	exit(bench(s))
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bulk:", err)
		os.Exit(1)
	}
	os.Exit(0)
}
