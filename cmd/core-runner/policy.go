package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/runner"
	"github.com/org-runink/runbus/runner/policy"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/runner/source/all"
)

func policyCommand() *cli.Command {
	asJSON := &cli.BoolFlag{Name: "json", Usage: "print one JSON object"}
	return &cli.Command{
		Name: "policy", Usage: "check and try out a local policy file", OnUsageError: usage, HideHelpCommand: true, Action: incomplete,
		Subcommands: []*cli.Command{
			{
				Name: "check", Usage: "validate a policy file and print its rules in normal form", ArgsUsage: "FILE", OnUsageError: usage,
				Description: "Exit status: 0 valid, 2 not valid, or usage. With --json an error is an object on standard error.",
				Flags:       []cli.Flag{asJSON}, Action: checkPolicy,
			},
			{
				Name: "test", Usage: "say whether a policy file allows a connection or a file, and by which rule", ArgsUsage: "FILE", OnUsageError: usage,
				Description: "Names are resolved on this host, as the runner would. Files must also be below RUNNER_FILE_ROOTS, which is not looked at here.\n\n" +
					"Exit status: 0 allowed, 1 denied, 2 usage, or a file that is not valid.",
				Flags: []cli.Flag{
					&cli.StringFlag{Name: "kind", Usage: "source kind: " + strings.Join(all.Kinds(), ", ")},
					&cli.StringFlag{Name: "host", Usage: "name or address to connect to, with --port"},
					&cli.StringFlag{Name: "address", Usage: "take this address for what the host resolves to"},
					&cli.IntFlag{Name: "port", Usage: "port to connect to"},
					&cli.StringFlag{Name: "path", Usage: "absolute path of a file to read"},
					asJSON,
				},
				Action: testPolicy,
			},
		},
	}
}

// fileLast lets the file of `policy check FILE --json` stand before the flags, as people write it.
func fileLast(args []string) []string {
	if len(args) > 4 && args[1] == "policy" && !strings.HasPrefix(args[3], "-") {
		return append(slices.Concat(args[:3], args[4:]), args[3])
	}
	return args
}

func readPolicy(c *cli.Context) (*policy.Policy, error) {
	if i := slices.IndexFunc(c.Args().Slice(), func(a string) bool { return strings.HasPrefix(a, "-") }); i >= 0 {
		return nil, usageError("the flag " + c.Args().Get(i) + " stands behind the file and other flags: the file comes first, or last")
	}
	if c.Args().Len() != 1 {
		return nil, usageError("name one policy file (see core-runner policy --help)")
	}
	p, err := policy.ReadFile(c.Args().First(), all.Kinds())
	if err != nil {
		return nil, usageError(err.Error())
	}
	return p, nil
}

func printJSON(c *cli.Context, v any) error {
	e := json.NewEncoder(c.App.Writer)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

func checkPolicy(c *cli.Context) error {
	p, err := readPolicy(c)
	if err != nil {
		return err
	}
	if c.Bool("json") {
		return printJSON(c, struct {
			Digest string         `json:"digest"`
			Policy *policy.Policy `json:"policy"`
		}{p.Digest(), p})
	}
	_, err = fmt.Fprint(c.App.Writer, p.Text())
	return err
}

// tried is the answer of `policy test`.
type tried struct {
	policy.Decision
	Addresses []triedAddress `json:"addresses,omitempty"`
	Reason    string         `json:"reason,omitempty"` // of a refusal that no rule can change
}

type triedAddress struct {
	Address string `json:"address"`
	policy.Decision
}

func testPolicy(c *cli.Context) error {
	p, err := readPolicy(c)
	if err != nil {
		return err
	}
	kind, host, address, path, port := c.String("kind"), c.String("host"), c.String("address"), c.String("path"), c.Int("port")
	network := host != "" || c.IsSet("port") || address != ""
	switch {
	case kind == "":
		return usageError("--kind is missing: " + strings.Join(all.Kinds(), ", "))
	case !slices.Contains(all.Kinds(), kind):
		return usageError(fmt.Sprintf("unknown kind %q: this build has %s", kind, strings.Join(all.Kinds(), ", ")))
	case network == (path != ""):
		return usageError("say --host with --port, or --path")
	case path != "" && !filepath.IsAbs(path):
		return usageError("--path must be absolute")
	case address != "" && !isAddress(address):
		return usageError("--address is not an IP address")
	case network && (host == "" || port < 1 || port > 65535):
		return usageError("--host comes with --port, from 1 to 65535")
	}
	var t tried
	switch d := p.Kind(kind); {
	case !d.Allowed:
		t.Decision = d
	case path != "":
		t.Decision = p.Path(kind, filepath.Clean(path), policy.Resolve(path))
	default:
		t = tryDial(c.Context, p, kind, host, address, port)
	}
	if c.Bool("json") {
		err = printJSON(c, t)
	} else {
		err = t.print(c)
	}
	if err == nil && !t.Allowed {
		return &runner.ExitError{Code: runner.ExitFailed, Err: errDenied}
	}
	return err
}

func isAddress(text string) bool {
	_, err := netip.ParseAddr(text)
	return err == nil
}

// errDenied is the exit status of a refusal that was printed already.
var errDenied = errors.New("denied")

// tryDial asks what a dial would ask, without dialling.
func tryDial(ctx context.Context, p *policy.Policy, kind, host, address string, port int) tried {
	var t tried
	to := cmp.Or(address, host)
	err := source.CheckHost(host)
	if err == nil {
		_, err = source.ResolveFor(ctx, nil, "tcp", net.JoinHostPort(to, strconv.Itoa(port)), func(_ string, ip netip.Addr, port uint16) error {
			d := p.Dial(kind, host, ip, port)
			t.Addresses = append(t.Addresses, triedAddress{Address: netip.AddrPortFrom(ip, port).String(), Decision: d})
			if !t.Allowed && (d.Allowed || t.Rule == "") {
				t.Decision = d
			}
			return nil
		})
	}
	if err != nil {
		t = tried{Reason: err.Error()}
	}
	return t
}

func (t tried) print(c *cli.Context) error {
	var out strings.Builder
	word := map[bool]string{true: "allowed", false: "denied"}
	for _, a := range t.Addresses {
		fmt.Fprintf(&out, "%s  %s by %s\n", a.Address, word[a.Allowed], a.Rule)
	}
	if t.Reason != "" {
		fmt.Fprintf(&out, "denied: %s\n", t.Reason)
	} else {
		fmt.Fprintf(&out, "%s by %s\n", word[t.Allowed], t.Rule)
	}
	_, err := fmt.Fprint(c.App.Writer, process.Printable(out.String()))
	return err
}
