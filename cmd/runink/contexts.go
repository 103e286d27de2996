package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/urfave/cli/v2"

	"github.com/org-runink/runbus/internal/durable"
	"github.com/org-runink/runbus/internal/selfguard"
	"github.com/org-runink/runbus/schemas"
)

// contexts is the context file: where servers are, and the tokens for them. It is mode 0600.
type contexts struct {
	Current  string              `json:"current"`
	Contexts map[string]endpoint `json:"contexts"`
}

// endpoint is one context.
type endpoint struct {
	URL   string `json:"url"`
	Token string `json:"token"`
	CA    string `json:"ca,omitempty"` // PEM file
	// What the local stack knows beside: for the operator's commands and for `runink nats context`.
	DataDir string `json:"dataDir,omitempty"`
	NATS    string `json:"nats,omitempty"`
	NATSCA  string `json:"natsCA,omitempty"`
}

func contextFile() (string, error) {
	dir, err := os.UserConfigDir()
	if err != nil {
		return "", usageHint("set HOME or XDG_CONFIG_HOME", "no folder for the context file: %w", err)
	}
	return filepath.Join(dir, "runink", "context.json"), nil
}

func loadContexts() (contexts, error) {
	all := contexts{Contexts: map[string]endpoint{}}
	file, err := contextFile()
	if err != nil {
		return all, err
	}
	info, err := os.Stat(file)
	if errors.Is(err, os.ErrNotExist) {
		return all, nil
	}
	if err != nil {
		return all, err
	}
	if info.Mode().Perm()&0o077 != 0 {
		return all, usageHint("chmod 600 "+file, "the context file %s is open to others (mode %04o), and it holds tokens", file, info.Mode().Perm())
	}
	b, err := os.ReadFile(file)
	if err != nil {
		return all, err
	}
	if err := json.Unmarshal(b, &all); err != nil {
		return all, usageHint("mend it, or move it away; `runink up` writes a new one", "the context file %s is damaged: %w", file, err)
	}
	if all.Contexts == nil {
		all.Contexts = map[string]endpoint{}
	}
	return all, nil
}

// changeContexts changes what is kept: no other command's change comes in between, which would be lost with its token. Nothing changes when
// change fails.
func changeContexts(change func(*contexts) error) error {
	file, err := contextFile()
	if err != nil {
		return err
	}
	dir := filepath.Dir(file)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(dir, "context.lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close() // which ends the lock
	if err := locked(func() error { return syscall.Flock(int(lock.Fd()), syscall.LOCK_EX) }); err != nil {
		return fmt.Errorf("lock the context file: %w", err)
	}
	all, err := loadContexts()
	if err != nil {
		return err
	}
	if err := change(&all); err != nil {
		return err
	}
	b, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	return durable.Replace(file, append(b, '\n'), nil)
}

// locked calls lock until it is not interrupted. A file system that has no locks, or no service for them, as NFS may, goes without: a change
// that comes in between is rare.
func locked(lock func() error) error {
	for {
		err := lock()
		switch {
		case errors.Is(err, syscall.EINTR):
		case errors.Is(err, errors.ErrUnsupported), errors.Is(err, syscall.ENOLCK):
			return nil
		default:
			return err
		}
	}
}

func saveContext(name string, s endpoint, current bool) error {
	return changeContexts(func(all *contexts) error {
		all.Contexts[name] = s
		if current || all.Current == "" {
			all.Current = name
		}
		return nil
	})
}

func useContext(name string) error {
	return changeContexts(func(all *contexts) error {
		_, err := all.named(name)
		all.Current = name
		return err
	})
}

func removeContext(name string) error {
	return changeContexts(func(all *contexts) error {
		_, err := all.named(name)
		delete(all.Contexts, name)
		if all.Current == name {
			all.Current = ""
		}
		return err
	})
}

// envToken is RUNINK_TOKEN, which is taken out of the environment at the first call: what is started here does not inherit it, and nobody
// reads it off the process while a fetch runs.
var envToken = sync.OnceValue(func() string {
	token := os.Getenv("RUNINK_TOKEN")
	_ = selfguard.ForgetEnv("RUNINK_TOKEN") // where that fails, the shell that set it shows it too
	return token
})

// chosen is the server that a command talks to: the environment's, else --context, else the current context.
func chosen(c *cli.Context) (endpoint, error) {
	env := endpoint{URL: os.Getenv("RUNINK_URL"), Token: envToken(), CA: os.Getenv("RUNINK_CA")}
	name := contextName(c)
	if env.URL != "" {
		// A token goes to the server that it is for, never to one that was named beside it by chance.
		if env.Token == "" {
			return endpoint{}, usagef("RUNINK_URL is set and RUNINK_TOKEN is not: set both")
		}
		if name != "" {
			return endpoint{}, usagef("RUNINK_URL names one server and the context %q another: drop one of them", name)
		}
		return env, nil
	}
	s, err := namedContext(name)
	if err != nil {
		return endpoint{}, err
	}
	s.Token, s.CA = cmp.Or(env.Token, s.Token), cmp.Or(env.CA, s.CA)
	return s, nil
}

// contextName is --context of the command, or the global one.
func contextName(c *cli.Context) string {
	for _, level := range c.Lineage() {
		if name := level.String("context"); name != "" {
			return name
		}
	}
	return ""
}

func namedContext(name string) (endpoint, error) {
	all, err := loadContexts()
	if err != nil {
		return endpoint{}, err
	}
	return all.named(name)
}

// named is the context of this name, the current one if that is empty.
func (all *contexts) named(name string) (endpoint, error) {
	if name == "" {
		name = all.Current
	}
	if name == "" {
		if known := slices.Sorted(maps.Keys(all.Contexts)); len(known) > 0 {
			return endpoint{}, usageHint("runink context use "+known[0], "no context is the current one: there are %s", strings.Join(known, ", "))
		}
		return endpoint{}, usageHint("start one with `runink up`, or name one with `runink context add` or RUNINK_URL and RUNINK_TOKEN", "no server is known yet")
	}
	s, ok := all.Contexts[name]
	if !ok {
		return endpoint{}, usagef("no context is named %q: there are %s", name, cmp.Or(strings.Join(slices.Sorted(maps.Keys(all.Contexts)), ", "), "none"))
	}
	return s, nil
}

// operatorServer is chosen with the operator's token: the one from the data folder of a local stack, unless RUNINK_TOKEN or the context
// holds it.
func operatorServer(c *cli.Context) (endpoint, error) {
	s, err := chosen(c)
	if err != nil || envToken() != "" || s.DataDir == "" {
		return s, err // whoever is not the operator is told so by the server
	}
	b, err := os.ReadFile(filepath.Join(s.DataDir, "operator.token"))
	if err != nil {
		return s, schemas.Wrap(schemas.CodeForbidden, err, "the operator's token can't be read").WithHint("run this as the user who runs the control plane")
	}
	s.Token = strings.TrimSpace(string(b))
	return s, nil
}
