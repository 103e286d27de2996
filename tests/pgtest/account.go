package pgtest

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// account is who runs PostgreSQL, which refuses to run as root: the caller, or user postgres when the caller is root.
type account struct {
	credential *syscall.Credential // nil: the caller
}

func whoRuns() (account, error) {
	if os.Geteuid() != 0 {
		return account{}, nil
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		return account{}, fmt.Errorf("PostgreSQL does not run as root and there is no user postgres; Debian's package \"postgresql\" makes it: %w", err)
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return account{}, fmt.Errorf("user postgres: %w", err)
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return account{}, fmt.Errorf("user postgres: %w", err)
	}
	return account{credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}, nil
}

// maxSocketDir keeps <dir>/.s.PGSQL.65535 below the 107 bytes that a socket's address holds.
const maxSocketDir = 90

// tempDir makes a folder that the account owns and reaches. TMPDIR comes first; root's may be closed to others, then it is
// one that is open to all.
func (a account) tempDir() (string, error) {
	var failed []error
	for _, parent := range []string{os.TempDir(), "/tmp", "/var/tmp", "/dev/shm"} {
		dir, err := os.MkdirTemp(parent, "runbus-pg-")
		if err != nil {
			failed = append(failed, err)
			continue
		}
		if err = a.own(dir); err == nil && len(dir) > maxSocketDir {
			err = fmt.Errorf("%s is too long for the address of a socket", dir)
		}
		if err == nil {
			err = a.run(dir, "test", "-w", dir)
		}
		if err == nil {
			return dir, nil
		}
		failed = append(failed, err, os.RemoveAll(dir))
	}
	return "", fmt.Errorf("no folder for PostgreSQL's files: %w", errors.Join(failed...))
}

func (a account) own(path string) error {
	if a.credential == nil {
		return nil
	}
	return os.Chown(path, int(a.credential.Uid), int(a.credential.Gid))
}

func (a account) writeFile(path, text string) error {
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return err
	}
	return a.own(path)
}

// command is a program of the account in dir, in an environment that leads it to no other server.
func (a account) command(dir, program string, args ...string) *exec.Cmd {
	cmd := exec.Command(program, args...) //nolint:gosec,noctx // PostgreSQL's programs, which outlive the call
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "LC_ALL=C", "TZ=UTC"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: a.credential}
	return cmd
}

func (a account) run(dir, program string, args ...string) (err error) {
	// The server inherits pg_ctl's output: a pipe there would not end before the server does.
	output, err := os.CreateTemp("", "runbus-pg-output-")
	if err != nil {
		return err
	}
	defer output.Close()
	defer func() { err = errors.Join(err, os.Remove(output.Name())) }()
	cmd := a.command(dir, program, args...)
	cmd.Stdout, cmd.Stderr = output, output
	if err := cmd.Run(); err != nil {
		text, readErr := os.ReadFile(output.Name())
		return fmt.Errorf("%s: %w: %s", filepath.Base(program), errors.Join(err, readErr), strings.TrimSpace(string(text)))
	}
	return nil
}

// guard is a process that outlives a test that is killed: when its standard input ends, for whatever reason, it stops the
// server and removes its files.
type guard struct {
	cmd   *exec.Cmd
	input io.Closer
	dir   string
}

const guardScript = `cat >/dev/null
cd /
[ -f "$1/data/postmaster.pid" ] && "$2" stop --silent --mode=immediate --wait --pgdata "$1/data" >/dev/null 2>&1
rm -rf "$1"/* "$1"/.s.* 2>/dev/null
rmdir "$1" 2>/dev/null
exit 0`

func (a account) watch(bin, dir string) (*guard, error) {
	cmd := a.command(dir, "/bin/sh", "-c", guardScript, "guard", dir, filepath.Join(bin, "pg_ctl"))
	cmd.SysProcAttr.Setsid = true // an interrupt typed at the terminal is for the tests
	input, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the guard of PostgreSQL: %w", err)
	}
	return &guard{cmd: cmd, input: input, dir: dir}, nil
}

// stop ends the server, waits for that, and removes its files.
func (g *guard) stop() error {
	if err := errors.Join(g.input.Close(), g.cmd.Wait()); err != nil {
		return err
	}
	return os.RemoveAll(g.dir) // in a sticky folder the account can't, the caller can
}
