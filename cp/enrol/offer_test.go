package enrol

import (
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/cp/roster"
	"github.com/org-runink/runbus/schemas"
)

// C9: a runner that is offered a second link and stands still is told over the first one that it is revoked, before the connection is cut.
// One without a link may take the one that it is offered, so that it can be told at all.
func TestARevocationEndsTheOfferOfASecondLink(t *testing.T) {
	ca, id := newCA(t), schemas.NewRunnerID()
	pair, _ := issue(t, ca, id, func(*x509.Certificate) {})
	roots := x509.NewCertPool()
	roots.AddCert(ca.cert)
	const revoked = time.Second
	for _, c := range []struct {
		what string
		link *spliced
		want time.Duration // that the offer takes
	}{{"beside a link", &spliced{}, revoked}, {"without one", nil, answerWithin}} {
		synctest.Test(t, func(t *testing.T) {
			near, far := net.Pipe()
			preface := make(chan error, 1)
			ended := make(chan struct{})
			go func() { // a runner that reads the preface, and says nothing
				defer close(ended)
				conn := tls.Server(far, &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}})
				_, err := link.Receive(conn, time.Time{})
				preface <- err
				_, _ = conn.Read(make([]byte, 1))
				_ = conn.Close()
			}()
			conn := tls.Client(near, &tls.Config{
				MinVersion: tls.VersionTLS13, RootCAs: roots, InsecureSkipVerify: true, // a pipe has no name
			})
			x := newTender(&Dialler{d: DiallerDeps{Tokens: newTokens(t), ServerID: "S", Now: time.Now, Log: slog.New(slog.DiscardHandler)}}, id)
			x.link = c.link
			over := make(chan error, 1)
			began := time.Now()
			go func() { over <- x.offer(t.Context(), conn, roster.Runner{ID: id, Tenant: "acme"}, "leaf") }()
			if err := <-preface; err != nil {
				t.Fatal(err)
			}
			<-time.After(revoked)
			x.revoke()
			err := <-over
			if took := time.Since(began); err == nil || took != c.want {
				t.Errorf("%s: %v after %s", c.what, err, took)
			}
			_ = conn.Close()
			<-ended
		})
	}
}
