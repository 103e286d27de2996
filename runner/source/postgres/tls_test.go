package postgres

import (
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
	"github.com/org-runink/runbus/tests/pgtest"
)

// TLS verifies whom it talks to, and a password is not sent in the clear to who is not verified.
func TestTLS(t *testing.T) {
	secure := pgtest.Start(t, pgtest.WithTLS())
	const query = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
	for _, c := range []struct {
		settings []string
		want     string // of the query, or part of the error
	}{
		{nil, "f"},
		{[]string{"sslMode", "disable"}, "f"},
		{[]string{"sslMode", "require"}, "t"},
		{[]string{"sslMode", "verify-full", "sslRootCert", secure.CA}, "t"},
		{[]string{"sslMode", "verify-full", "sslRootCert", secure.CA, "host", "localhost"}, "t"},
		{[]string{"sslMode", "verify-ca", "sslRootCert", secure.CA}, "t"},
		{[]string{"sslMode", "require", "sslRootCert", secure.CA}, "t"},
		{[]string{"sslRootCert", secure.CA}, "t"},
		{[]string{"sslMode", "verify-full"}, "certificate"},
		{[]string{"sslMode", "verify-ca"}, "certificate"},
		{[]string{"sslMode", "verify-full", "sslRootCert", pgtest.Start(t, pgtest.WithTLS()).CA}, "certificate"},
	} {
		r := fetchAll(t.Context(), t, request(secure, query, c.settings...), source.Limits{})
		switch {
		case len(c.want) > 1:
			if r.err == nil || !strings.Contains(r.err.Error(), c.want) {
				t.Errorf("%.40q: %v", c.settings, r.err)
			}
		case r.err != nil:
			t.Errorf("%.40q: %v", c.settings, r.err)
		default:
			if got := format(t, r.batches[0].Column(0), 0); got != c.want {
				t.Errorf("%.40q: TLS is %s", c.settings, got)
			}
		}
	}
	// By another name: the certificate is for localhost.
	named := func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, net.JoinHostPort(secure.Host, strconv.Itoa(secure.Port)))
	}
	for mode, ok := range map[string]bool{"verify-full": false, "": false, "verify-ca": true} {
		err := New().Fetch(t.Context(), source.Env{Dial: named}, request(secure, query, "host", "db.example", "sslMode", mode, "sslRootCert", secure.CA), source.NewOutput(io.Discard, source.Limits{}, nil))
		if (err == nil) != ok {
			t.Errorf("mode %q under another name: %v", mode, err)
		}
	}
	// A cancel request is encrypted as the connection is.
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if r := fetchAll(ctx, t, request(secure, "SELECT pg_sleep(600)", "sslMode", "verify-full", "sslRootCert", secure.CA), source.Limits{}); !errors.Is(r.err, context.DeadlineExceeded) {
		t.Errorf("got %v", r.err)
	}
	watch := secure.Admin(t)
	for textOf(t, watch, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'runbus'")[0] != "=0" {
		exec(t, watch, "SELECT pg_stat_clear_snapshot(), pg_sleep(0.002)")
	}
}

func TestPasswordIsNotSentInTheClear(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	heard := make(chan string, 1)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			heard <- err.Error()
			return
		}
		defer conn.Close()
		start := make([]byte, 4096)
		if _, err := conn.Read(start); err != nil {
			heard <- err.Error()
			return
		}
		if _, err := conn.Write([]byte{'R', 0, 0, 0, 8, 0, 0, 0, 3}); err != nil { // AuthenticationCleartextPassword
			heard <- err.Error()
			return
		}
		said, err := io.ReadAll(conn)
		if err != nil {
			heard <- err.Error()
			return
		}
		heard <- string(said)
	}()
	dial := func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, l.Addr().String())
	}
	err = New().Fetch(t.Context(), source.Env{Dial: dial}, request(shared, "SELECT 1", "host", "db.example", "sslMode", "disable"), source.NewOutput(io.Discard, source.Limits{}, nil))
	var e *schemas.Error
	if !asError(err, &e) || !strings.Contains(e.Hint, "in the clear") {
		t.Errorf("got %v", err)
	}
	if said := <-heard; strings.Contains(said, shared.Password) || strings.HasPrefix(said, "p") {
		t.Error("the password was sent in the clear")
	}
}
