package main

import (
	"encoding/json"
	"os"
	"os/user"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/cp"
	"github.com/org-runink/runbus/internal/durable"
	"github.com/org-runink/runbus/schemas"
)

// natsContext is a context file of the stock nats CLI.
type natsContext struct {
	Description string `json:"description"`
	URL         string `json:"url"`
	NKey        string `json:"nkey"` // path of the seed's file
	CA          string `json:"ca,omitempty"`
}

func natsCommand() *cli.Command {
	write := remote("context", "write contexts for the stock nats CLI: runbus-ops (reads the bus) and runbus-sys (reads the servers)", "", []cli.Flag{
		&cli.StringFlag{Name: "dir", Usage: "`DIR` of the nats CLI's contexts (default: where it looks: nats/context in XDG_CONFIG_HOME, else in .config of the account's home folder)"},
		&cli.StringFlag{Name: "prefix", Value: "runbus", Usage: "begins the names"},
		&cli.StringFlag{Name: "data-dir", Usage: "`DIR` of a control plane that `face` runs (RUNBUS_DATA_DIR); without it, the current context's"},
		&cli.StringFlag{Name: "server", Usage: "`URL` of its bus, with --data-dir", Value: "tls://" + cp.DefaultNATS},
	}, natsContexts)
	write.Description = "The credentials stay in the control plane's data folder (0600); the contexts hold their paths. Both can look and change\nnothing."
	return group("nats", "the stock nats CLI", write)
}

func natsContexts(c *cli.Context) error {
	if err := noArgs(c); err != nil {
		return err
	}
	s, err := opsServer(c)
	if err != nil {
		return err
	}
	dir := c.String("dir")
	if dir == "" {
		base, err := natsConfigDir()
		if err != nil {
			return err
		}
		dir = filepath.Join(base, "nats", "context")
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return schemas.Errorf(schemas.CodeFailed, "the folder of the nats CLI's contexts can't be made: %w", err)
	}
	prefix := c.String("prefix")
	if prefix == "" || strings.ContainsAny(prefix, `/\`) {
		return usagef("--prefix %q is not a name", prefix)
	}
	type written struct {
		Name string `json:"name"`
		File string `json:"file"`
		Use  string `json:"use"`
	}
	var out []written
	for _, w := range []struct{ name, seed, text, use string }{
		{prefix + "-ops", "ops.nk", "Runbus: read-only view of the bus", natsWatch(prefix + "-ops")},
		{prefix + "-sys", "ops-sys.nk", "Runbus: read-only view of the servers", "nats --context " + prefix + "-sys server list"},
	} {
		seed := filepath.Join(s.DataDir, w.seed)
		if _, err := os.Stat(seed); err != nil {
			return schemas.Errorf(schemas.CodeForbidden, "the credential of ops can't be read: %w", err).WithHint("run this as the user who runs the control plane")
		}
		b, err := json.MarshalIndent(natsContext{Description: w.text, URL: s.NATS, NKey: seed, CA: s.NATSCA}, "", "  ")
		if err != nil {
			return err
		}
		file := filepath.Join(dir, w.name+".json")
		if err := durable.Replace(file, append(b, '\n'), nil); err != nil {
			return schemas.Errorf(schemas.CodeFailed, "the context can't be written: %w", err)
		}
		out = append(out, written{w.name, file, w.use})
	}
	return show(c, out, []string{"CONTEXT", "TRY"}, func(w written) []any { return []any{w.Name, w.Use} })
}

// opsServer is where the bus is and its credentials are: in the data folder that --data-dir names, else in the one of `runink up`.
func opsServer(c *cli.Context) (endpoint, error) {
	if name := c.String("data-dir"); name != "" {
		dir, err := filepath.Abs(name)
		if err != nil {
			return endpoint{}, err
		}
		s := endpoint{DataDir: dir, NATS: c.String("server")}
		if ca := filepath.Join(dir, "tls", "ca.pem"); fileExists(ca) {
			s.NATSCA = ca
		}
		return s, nil
	}
	if c.IsSet("server") {
		return endpoint{}, usageHint("add --data-dir, or leave it away", "--server goes with --data-dir")
	}
	s, err := chosen(c)
	if err == nil && (s.DataDir == "" || s.NATS == "") {
		err = usageHint("run this on the control plane's host, with --data-dir DIR (and --server)", "the context has no data folder, where the credentials of ops are")
	}
	return s, err
}

func fileExists(name string) bool {
	_, err := os.Stat(name)
	return err == nil
}

// natsConfigDir is where the nats CLI looks: XDG_CONFIG_HOME, else .config in the home folder that the user's account has (not
// the one of HOME), on every system.
func natsConfigDir() (string, error) {
	if dir := os.Getenv("XDG_CONFIG_HOME"); dir != "" {
		return dir, nil
	}
	u, err := user.Current()
	if err != nil || u.HomeDir == "" {
		return "", schemas.Errorf(schemas.CodeInvalid, "no folder for the contexts: this user has no home folder").WithHint("name one with --dir, or set XDG_CONFIG_HOME")
	}
	return filepath.Join(u.HomeDir, ".config"), nil
}
