// Package pgtest gives tests a real PostgreSQL: a cluster of its own, made by initdb and pg_ctl in a temporary folder, that
// listens on a free port of the loopback and on a socket in that folder, and is stopped and removed at the end, also when the
// test fails, panics or is killed.
//
// A machine without PostgreSQL fails the test and says which package to install; nothing is skipped.
package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// Cluster is a running PostgreSQL. Its fields don't change; it is safe for concurrent use.
type Cluster struct {
	Host     string // 127.0.0.1
	Port     int
	User     string // a superuser
	Password string // random; TCP connections authenticate with SCRAM-SHA-256
	Database string
	Socket   string // folder of the Unix socket, where User needs no password
	CA       string // PEM of the authority behind the server's certificate; empty without WithTLS

	files string // everything of the cluster; removed at the end
	guard *guard
}

type options struct {
	tls      bool
	settings []string
}

// Option changes what Start starts.
type Option func(*options)

// WithTLS has the server offer TLS with a certificate for localhost and 127.0.0.1.
func WithTLS() Option { return func(o *options) { o.tls = true } }

// WithSetting sets a server parameter, for example WithSetting("max_connections", "5").
func WithSetting(name, value string) Option {
	return func(o *options) {
		o.settings = append(o.settings, fmt.Sprintf("%s = '%s'", name, strings.ReplaceAll(value, "'", "''")))
	}
}

// Start starts a cluster for one test. It fails the test when that is not possible.
func Start(t testing.TB, o ...Option) *Cluster {
	t.Helper()
	c, stop, err := StartShared(o...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Errorf("stop PostgreSQL: %v", err)
		}
	})
	return c
}

// StartShared starts a cluster for the tests of a whole package, from its TestMain; stop ends and removes it.
func StartShared(o ...Option) (c *Cluster, stop func() error, err error) {
	var opt options
	for _, set := range o {
		set(&opt)
	}
	bin, err := findBinaries()
	if err != nil {
		return nil, nil, err
	}
	as, err := whoRuns()
	if err != nil {
		return nil, nil, err
	}
	dir, err := as.tempDir()
	if err != nil {
		return nil, nil, err
	}
	c = &Cluster{Host: "127.0.0.1", User: "runbus", Password: rand.Text(), Database: "postgres", Socket: dir, files: dir}
	c.guard, err = as.watch(bin, dir)
	if err != nil {
		return nil, nil, errors.Join(err, os.RemoveAll(dir))
	}
	if err := c.start(bin, as, opt); err != nil {
		return nil, nil, errors.Join(err, c.guard.stop())
	}
	return c, c.guard.stop, nil
}

func (c *Cluster) start(bin string, as account, opt options) error {
	data := filepath.Join(c.files, "data")
	secret := filepath.Join(c.files, "password")
	if err := as.writeFile(secret, c.Password+"\n"); err != nil {
		return err
	}
	if err := as.run(c.files, filepath.Join(bin, "initdb"), "--pgdata", data, "--username", c.User, "--pwfile", secret,
		"--auth-local=trust", "--auth-host=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync"); err != nil {
		return err
	}
	settings := append([]string{
		"listen_addresses = '127.0.0.1'", "unix_socket_directories = '" + c.Socket + "'", "unix_socket_permissions = 0700",
		"fsync = off", "synchronous_commit = off", "full_page_writes = off", "max_wal_size = '4GB'",
		"password_encryption = 'scram-sha-256'", "timezone = 'UTC'", "log_timezone = 'UTC'",
	}, opt.settings...)
	if opt.tls {
		ca, certificate, key, err := newCertificate()
		if err != nil {
			return err
		}
		c.CA = ca
		if err := errors.Join(as.writeFile(filepath.Join(data, "server.crt"), certificate), as.writeFile(filepath.Join(data, "server.key"), key)); err != nil {
			return err
		}
		settings = append(settings, "ssl = on")
	}
	// The port is free when it is chosen and may be taken when the server binds it: then another is tried.
	var err error
	for range 5 {
		if c.Port, err = freePort(); err != nil {
			return err
		}
		conf := strings.Join(append(settings, "port = "+strconv.Itoa(c.Port)), "\n") + "\n"
		if err = as.writeFile(filepath.Join(data, "postgresql.auto.conf"), conf); err != nil {
			return err
		}
		log := filepath.Join(c.files, "log")
		if err = as.run(c.files, filepath.Join(bin, "pg_ctl"), "start", "--wait", "--timeout=120", "--silent", "--pgdata", data, "--log", log); err == nil {
			return nil
		}
		text, readErr := os.ReadFile(log)
		err = fmt.Errorf("%w\n%s", errors.Join(err, readErr), text)
		if !strings.Contains(string(text), "could not bind") {
			return err
		}
		if err := os.Remove(log); err != nil {
			return err
		}
	}
	return err
}

// ConnString is the connection string of c in pgx's form, over TCP without TLS. It has the password in it.
func (c *Cluster) ConnString() string {
	return fmt.Sprintf("host=%s port=%d user=%s password=%s dbname=%s sslmode=disable", c.Host, c.Port, c.User, c.Password, c.Database)
}

// Connect opens a connection as the superuser.
func (c *Cluster) Connect(ctx context.Context) (*pgx.Conn, error) {
	return pgx.Connect(ctx, c.ConnString())
}

// Admin is a connection as the superuser that is closed when the test ends.
func (c *Cluster) Admin(t testing.TB) *pgx.Conn {
	t.Helper()
	conn, err := c.Connect(t.Context())
	if err != nil {
		t.Fatalf("connect to PostgreSQL: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := conn.Close(ctx); err != nil {
			t.Errorf("close the connection to PostgreSQL: %v", err)
		}
	})
	return conn
}

// Exec runs SQL, several statements if need be, on a connection of its own as the superuser.
func (c *Cluster) Exec(t testing.TB, sql string) {
	t.Helper()
	if err := c.exec(t.Context(), sql); err != nil {
		t.Fatalf("%v\nin: %s", err, sql)
	}
}

func (c *Cluster) exec(ctx context.Context, sql string) (err error) {
	conn, err := c.Connect(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close(ctx)) }()
	_, err = conn.PgConn().Exec(ctx, sql).ReadAll()
	return err
}

// findBinaries is the folder of PostgreSQL's server programs: the newest version below /usr/lib/postgresql, where Debian
// keeps them, else the one that PATH leads to.
func findBinaries() (string, error) {
	folders, err := filepath.Glob("/usr/lib/postgresql/*/bin")
	if err != nil {
		return "", err
	}
	best, newest := "", -1
	for _, dir := range folders {
		version, err := strconv.Atoi(filepath.Base(filepath.Dir(dir)))
		if err == nil && version > newest && complete(dir) {
			best, newest = dir, version
		}
	}
	if best != "" {
		return best, nil
	}
	if path, err := exec.LookPath("initdb"); err == nil {
		if path, err = filepath.EvalSymlinks(path); err == nil && complete(filepath.Dir(path)) {
			return filepath.Dir(path), nil
		}
	}
	return "", errors.New("these tests need a PostgreSQL server: install Debian's package \"postgresql\" (apt-get install postgresql), " +
		"or put initdb, pg_ctl and postgres in PATH")
}

func complete(dir string) bool {
	for _, name := range []string{"initdb", "pg_ctl", "postgres"} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			return false
		}
	}
	return true
}

func freePort() (int, error) {
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}
