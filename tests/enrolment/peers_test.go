package enrolment

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

type signer = crypto.Signer

func uris(u ...*url.URL) []*url.URL { return u }

// signed makes a key and a certificate for it, with its issuer behind it.
func signed(t *testing.T, template, issuer *x509.Certificate, issuerKey any) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template.SerialNumber = big.NewInt(time.Now().UnixNano())
	if issuerKey == nil {
		issuer, issuerKey = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, issuer, key.Public(), issuerKey)
	must(t, err)
	chain := [][]byte{der}
	if issuer != template {
		chain = append(chain, issuer.Raw)
	}
	return tls.Certificate{Certificate: chain, PrivateKey: key}
}

// selfSigned is what a stranger has.
func selfSigned(t *testing.T, id string) tls.Certificate {
	t.Helper()
	return signed(t, &x509.Certificate{
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), URIs: uris(schemas.RunnerURI(id)),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, nil, nil)
}

// listen serves TLS connections until the test ends, and returns its address.
func listen(t *testing.T, config *tls.Config, serve func(*tls.Conn)) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	must(t, err)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer func() { _ = conn.Close() }()
				_ = conn.SetDeadline(time.Now().Add(patience))
				serve(tls.Server(conn, config))
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		serving.Wait()
	})
	return l.Addr().String()
}

func helloFor(id string, at time.Time) *frame {
	return &frame{Said: &runbusv1.EnrolFrame_Hello{Hello: &runbusv1.EnrolHello{
		RunnerId: id, Mode: runbusv1.EnrolMode_ENROL_MODE_TICKET, ServerTime: timestamppb.New(at),
	}}}
}
