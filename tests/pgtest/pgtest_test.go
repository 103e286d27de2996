package pgtest

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

func TestStart(t *testing.T) {
	c := Start(t, WithTLS())
	var answer string
	if err := c.Admin(t).QueryRow(t.Context(), "SELECT current_user || ' ' || current_setting('fsync')").Scan(&answer); err != nil || answer != c.User+" off" {
		t.Fatalf("got %q, %v", answer, err)
	}
	config, err := pgx.ParseConfig(c.ConnString())
	if err != nil {
		t.Fatal(err)
	}
	config.Password = "wrong"
	var refused *pgconn.PgError
	if conn, err := pgx.ConnectConfig(t.Context(), config); !errors.As(err, &refused) || refused.Code != "28P01" {
		t.Fatalf("a wrong password over TCP: %v, %v; want SQLSTATE 28P01", conn, err)
	}
	ca := t.TempDir() + "/ca.pem"
	if err := os.WriteFile(ca, []byte(c.CA), 0o600); err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(t.Context(), strings.Replace(c.ConnString(), "sslmode=disable", "sslmode=verify-full sslrootcert="+ca, 1))
	if err != nil {
		t.Fatalf("TLS: %v", err)
	}
	if err := conn.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestLargeTableIsDeterministic(t *testing.T) {
	c := Start(t)
	c.MakeLarge(t, "a", 3000)
	c.MakeLarge(t, "b", 3000)
	c.MakeLarge(t, "d", 2999)
	a := c.LargeSum(t, "a")
	if a.Rows != 3000 || a != c.LargeSum(t, "b") {
		t.Errorf("two tables of 3000 rows have the sums %v and %v", a, c.LargeSum(t, "b"))
	}
	c.Exec(t, "UPDATE b SET amount = amount + 0.01 WHERE id = 17")
	if a == c.LargeSum(t, "b") || a == c.LargeSum(t, "d") {
		t.Error("the sum does not depend on the rows")
	}
}

// A test process that is killed takes its cluster with it.
func TestKilledTestLeavesNothing(t *testing.T) {
	if os.Getenv("PGTEST_CHILD") != "" {
		c := Start(t)
		if _, err := os.Stdout.WriteString("started " + c.files + "\n"); err != nil {
			t.Fatal(err)
		}
		select {} // until it is killed
	}
	// The guard holds this pipe too: its end is the guard's end.
	child := exec.Command(os.Args[0], "-test.run=^TestKilledTestLeavesNothing$")
	child.Env = append(os.Environ(), "PGTEST_CHILD=1")
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	watch, held, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Close()
	child.ExtraFiles = []*os.File{held}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	if err := held.Close(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	dir := strings.TrimPrefix(strings.TrimSpace(line), "started ")
	if _, err := os.Stat(dir + "/data/postmaster.pid"); err != nil {
		t.Fatal(err)
	}
	if err := child.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := child.Wait(); err == nil {
		t.Fatal("the child was not killed")
	}
	if _, err := watch.Read(make([]byte, 1)); err == nil {
		t.Fatal("something wrote to the watched pipe")
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there: %v", dir, err)
	}
}
