package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/org-runink/runbus/tests/pgtest"
	"github.com/org-runink/runbus/tests/stack"
)

// database is the PostgreSQL of this package's tests, started when the first test asks for it.
var database struct {
	once    sync.Once
	cluster *pgtest.Cluster
	stop    func() error
	err     error
}

func postgres(t testing.TB) *pgtest.Cluster {
	t.Helper()
	database.once.Do(func() { database.cluster, database.stop, database.err = pgtest.StartShared() })
	if database.err != nil {
		t.Fatal(database.err)
	}
	return database.cluster
}

func stopPostgres() error {
	if database.stop == nil {
		return nil
	}
	return database.stop()
}

// login is a database user of one test. Its password is in no other place, so that a leak of it is found; its sessions are
// those of this test alone.
type login struct {
	*pgtest.Cluster
	admin *pgx.Conn
}

// logins is how many were made.
var logins atomic.Int64

// newLogin makes a user that may read everything, of this name with a number.
func newLogin(t *testing.T, name string) *login {
	t.Helper()
	c := *postgres(t)
	admin := c.Admin(t)
	name = fmt.Sprintf("%s_%d", name, logins.Add(1))
	c.User, c.Password = name, "pw-of-"+name+"-5eC7"
	for _, sql := range []string{fmt.Sprintf("CREATE ROLE %s LOGIN PASSWORD '%s'", name, c.Password), "GRANT pg_read_all_data TO " + name} {
		if _, err := admin.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	return &login{Cluster: &c, admin: admin}
}

func (l *login) settings() map[string]string {
	return map[string]string{"host": l.Host, "port": strconv.Itoa(l.Port), "database": l.Database, "username": l.User}
}

// body is a fetch of query by this user.
func (l *login) body(runner, query string) map[string]any {
	return map[string]any{
		"runnerId": runner, "source": map[string]any{"kind": "postgres", "settings": l.settings()}, "query": query,
		"secrets": map[string]string{"password": l.Password},
	}
}

// args are those of `runink fetch run` for the same, with the password in a file.
func (l *login) args(t *testing.T, runner, query string, more ...string) []string {
	t.Helper()
	args := []string{"fetch", "run", "--runner", runner, "--source", "postgres", "--query", query, "--secrets-file", secretsFile(t, l.Password)}
	for k, v := range l.settings() {
		args = append(args, "--set", k+"="+v)
	}
	return append(args, more...)
}

func secretsFile(t *testing.T, password string) string {
	t.Helper()
	b, err := json.Marshal(map[string]string{"password": password})
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), "secrets.json")
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// await asks pg_stat_activity until as many sessions of the user as wanted meet the condition. The view is a state, not an
// event, so it is asked again after each answer.
func (l *login) await(t *testing.T, want int, condition string) {
	t.Helper()
	l.awaitUnless(t, nil, want, condition)
}

// awaitUnless is await that returns false when ended is closed before.
func (l *login) awaitUnless(t *testing.T, ended <-chan struct{}, want int, condition string) bool {
	t.Helper()
	give := time.Now().Add(stack.Patience)
	for {
		var n int
		if err := l.admin.QueryRow(t.Context(), "SELECT count(*) FROM pg_stat_activity WHERE usename = $1 AND "+condition, l.User).Scan(&n); err != nil {
			t.Fatal(err)
		}
		if n == want {
			return true
		}
		if time.Now().After(give) {
			t.Fatalf("%d sessions of %s with %s, not %d", n, l.User, condition, want)
		}
		select {
		case <-ended:
			return false
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// awaitRuns waits until the user's query runs.
func (l *login) awaitRuns(t *testing.T) {
	t.Helper()
	l.await(t, 1, active)
}

const active = "state = 'active'"

// start starts the command line for query, and returns it with the fetch's id when the query runs.
func (l *login) start(t *testing.T, plane *stack.Plane, runner, query string, more ...string) (runink *stack.Process, dispatch string) {
	t.Helper()
	runs := func(ended <-chan struct{}) bool { return l.awaitUnless(t, ended, 1, active) }
	runink = plane.StartFetch(t, runs, l.args(t, runner, query, more...)...)
	var running []struct{ DispatchID string }
	plane.Admin.Must(t, http.MethodGet, "/api/fetches/running", nil, &running)
	if len(running) != 1 {
		t.Fatalf("%d fetches run: %+v", len(running), running)
	}
	return runink, running[0].DispatchID
}

// awaitGone waits until no session of the user is left, and says how long that took.
func (l *login) awaitGone(t *testing.T) time.Duration {
	t.Helper()
	began := time.Now()
	l.await(t, 0, "true")
	return time.Since(began)
}
