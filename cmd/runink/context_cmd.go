package main

import (
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/urfave/cli/v2"
)

func contextCommand() *cli.Command {
	return group("context", "servers and tokens that this user knows",
		command("list", "list the contexts", "", nil, func(c *cli.Context) error {
			if err := noArgs(c); err != nil {
				return err
			}
			all, err := loadContexts()
			if err != nil {
				return err
			}
			type row struct {
				Name    string `json:"name"`
				URL     string `json:"url"`
				Current bool   `json:"current"`
			}
			rows := []row{}
			for _, name := range slices.Sorted(maps.Keys(all.Contexts)) {
				rows = append(rows, row{name, all.Contexts[name].URL, name == all.Current})
			}
			return show(c, rows, []string{"", "NAME", "URL"}, func(r row) []any {
				mark := ""
				if r.Current {
					mark = "*"
				}
				return []any{mark, r.Name, r.URL}
			})
		}),
		command("use", "make a context the current one", "NAME", nil, func(c *cli.Context) error {
			name, err := oneArg(c, "NAME")
			if err != nil {
				return err
			}
			if err := useContext(name); err != nil {
				return err
			}
			return say(c, map[string]string{"current": name}, "the current context is %s", name)
		}),
		addContextCommand(),
		command("remove", "forget a context and its token", "NAME", nil, func(c *cli.Context) error {
			name, err := oneArg(c, "NAME")
			if err != nil {
				return err
			}
			if err := removeContext(name); err != nil {
				return err
			}
			return say(c, map[string]string{"removed": name}, "the context %s is gone", name)
		}),
	)
}

func addContextCommand() *cli.Command {
	return command("add", "remember a server and the token for it", "NAME", []cli.Flag{
		&cli.StringFlag{Name: "url", Usage: "`URL` of the control plane, https://host:port"},
		&cli.StringFlag{Name: "ca", Usage: "PEM `FILE` of its CA, when the system does not trust it"},
		&cli.StringFlag{Name: "token-file", Value: "-", Usage: "`FILE` (mode 0600, or - for standard input) with the session token"},
	}, func(c *cli.Context) error {
		name, err := oneArg(c, "NAME")
		if err != nil {
			return err
		}
		s := endpoint{URL: c.String("url")}
		if ca := c.String("ca"); ca != "" {
			if s.CA, err = filepath.Abs(ca); err != nil {
				return err
			}
		}
		if s.Token, err = readToken(c.String("token-file"), os.Stdin); err != nil {
			return err
		}
		if _, err := newClient(s); err != nil {
			return err
		}
		if err := saveContext(name, s, false); err != nil {
			return err
		}
		return say(c, map[string]string{"context": name, "url": s.URL}, "the context %s is for %s", name, s.URL)
	})
}
