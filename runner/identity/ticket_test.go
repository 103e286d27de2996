package identity_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/schemas"
)

func hintOf(err error) string {
	var e *schemas.Error
	if errors.As(err, &e) {
		return e.Hint
	}
	return ""
}

func TestTheTicketComesFromOnePlace(t *testing.T) {
	ca := newAuthority(t)
	ticket := ca.ticket(schemas.NewRunnerID())
	text := ticket.Encode()
	dir := t.TempDir()
	file := func(name, body string, mode os.FileMode) string {
		write(t, dir, name, body)
		return chmod(t, filepath.Join(dir, name), mode)
	}
	good := file("ticket", text+"\n", 0o600)
	readOnly := file("ticket-400", text, 0o400)
	symlink := filepath.Join(dir, "symlink")
	if err := os.Symlink(good, symlink); err != nil {
		t.Fatal(err)
	}
	pipe := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		env, file, want string
	}{
		"neither":             {},
		"variable":            {env: text},
		"variable, spaces":    {env: "  " + text + "\n"},
		"file":                {file: good},
		"file 0400":           {file: readOnly},
		"both":                {env: text, file: good, want: "both set"},
		"both, a bad file":    {env: text, file: "/nowhere", want: "both set"},
		"truncated":           {env: text[:40], want: "truncated"},
		"not a ticket":        {env: "hello", want: "does not begin with crt1."},
		"a service token":     {env: "rsk1.acme.SUAAAA", want: "does not begin with crt1."},
		"blank":               {env: " ", want: "there is no ticket in it"},
		"ticket as file name": {file: text, want: "it must name a file"},
		"missing file":        {file: filepath.Join(dir, "missing"), want: "does not exist"},
		"symbolic link":       {file: symlink, want: "symbolic link"},
		"FIFO":                {file: pipe, want: "not a regular file"},
		"device":              {file: os.DevNull, want: "not a regular file"},
		"folder":              {file: dir, want: "not a regular file"},
		"open to the group":   {file: file("640", text, 0o640), want: "mode 0640"},
		"open to all":         {file: file("644", text, 0o644), want: "mode 0644"},
		"executable":          {file: file("700", text, 0o700), want: "mode 0700"},
		"empty file":          {file: file("empty", "", 0o600), want: "there is no ticket in it"},
		"huge file":           {file: file("huge", strings.Repeat("x", 1<<17), 0o600), want: "over 65536 bytes"},
		"two tickets":         {file: file("two", text+"\n"+text, 0o600), want: "not a ticket"},
	} {
		t.Run(what, func(t *testing.T) {
			env := map[string]string{identity.EnvTicket: c.env, identity.EnvTicketFile: c.file}
			got, err := identity.TakeTicket(func(name string) string { return env[name] }, func(names ...string) error {
				for _, n := range names {
					delete(env, n)
				}
				return nil
			})
			if env[identity.EnvTicket] != "" {
				t.Error("the ticket is still in the environment")
			}
			if c.want == "" {
				if err != nil || (got == nil) != (what == "neither") || got != nil && *got != ticket {
					t.Fatal(got, err)
				}
				return
			}
			if err == nil || got != nil || !strings.Contains(err.Error(), c.want) || schemas.CodeOf(err) != schemas.CodeInvalid {
				t.Fatalf("%v does not say %q", err, c.want)
			}
			if what == "missing file" && !strings.Contains(hintOf(err), "`runink runner token NAME`") {
				t.Errorf("%q does not say how to get a new ticket", hintOf(err))
			}
			if strings.Contains(fmt.Sprint(err, hintOf(err)), text[8:24]) {
				t.Error("the error repeats the ticket")
			}
		})
	}
	t.Run("the variable can't be cleared", func(t *testing.T) {
		_, err := identity.TakeTicket(func(name string) string {
			if name == identity.EnvTicket {
				return text
			}
			return ""
		}, func(...string) error { return os.ErrPermission })
		if !errors.Is(err, os.ErrPermission) {
			t.Fatal(err)
		}
	})
}

func TestATicketFileOfSomebodyElse(t *testing.T) {
	if os.Geteuid() != 0 {
		// Without root no file can be given away; one of root that anybody may open stands for it.
		_, err := identity.TakeTicket(func(name string) string {
			return map[string]string{identity.EnvTicketFile: "/etc/hostname"}[name]
		}, func(...string) error { return nil })
		if err == nil || !strings.Contains(err.Error(), "belongs to the user 0") {
			t.Fatal(err)
		}
		return
	}
	ticket := newAuthority(t).ticket(schemas.NewRunnerID())
	dir := t.TempDir()
	write(t, dir, "ticket", ticket.Encode())
	name := filepath.Join(dir, "ticket")
	if err := os.Chown(name, 12345, -1); err != nil {
		t.Fatal(err)
	}
	_, err := identity.TakeTicket(func(n string) string { return map[string]string{identity.EnvTicketFile: name}[n] }, func(...string) error { return nil })
	if err == nil || !strings.Contains(err.Error(), "belongs to the user 12345") {
		t.Fatal(err)
	}
	state := enrolled(t, newAuthority(t), schemas.NewRunnerID())
	if err := os.Chown(state, 12345, -1); err != nil {
		t.Fatal(err)
	}
	if _, err := identity.Open(state); err == nil || !strings.Contains(err.Error(), "belongs to the user 12345") {
		t.Fatal(err)
	}
}

func TestTicketsOnTheCommandLineAndExpiredOnes(t *testing.T) {
	ticket := newAuthority(t).ticket(schemas.NewRunnerID())
	for _, args := range [][]string{{ticket.Encode()}, {"serve", "--ticket=" + ticket.Encode()}, {"serve", "CORE_RUNNER_TICKET=" + ticket.Encode()}} {
		err := identity.RefuseArgument(args)
		if err == nil || strings.Contains(err.Error(), ticket.Encode()[8:24]) {
			t.Error(err)
		}
	}
	if err := identity.RefuseArgument([]string{"serve", "--listen", ":7443"}); err != nil {
		t.Error(err)
	}
	if err := identity.Fresh(ticket, ticket.ExpiresAt.Add(-time.Second)); err != nil {
		t.Error(err)
	}
	err := identity.Fresh(ticket, ticket.ExpiresAt)
	if err == nil || !strings.Contains(err.Error(), "expired at") || !strings.Contains(hintOf(err), "clock") {
		t.Error(err)
	}
}
