package enrolment

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/org-runink/runbus/bus/link"
	"github.com/org-runink/runbus/runner/identity"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// The owner of a ticket, whose proof is right, can't have another key certified than the one that its connection is made with: the
// handshake would show nothing of the key that gets the certificate, and a reply that was lost could not be delivered again.
func TestARequestIsForTheKeyOfItsConnection(t *testing.T) {
	p := start(t)
	r, ticket := p.create(t, "edge")
	own := selfSigned(t, r.ID)
	ask := func(key signer) (refused *runbusv1.ErrorDetail, err error) {
		t.Helper()
		answers := make(chan *frame, 1)
		addr := listen(t, &tls.Config{MinVersion: tls.VersionTLS13, NextProtos: []string{link.ProtoEnrol}, Certificates: []tls.Certificate{own}, ClientAuth: tls.RequireAnyClientCert}, func(c *tls.Conn) {
			hello := new(frame)
			if link.ReadFrame(c, hello) != nil {
				return
			}
			csr, err := identity.Request(key, r.ID)
			if err != nil {
				return
			}
			cs := c.ConnectionState()
			binding, err := link.Bind(cs, r.ID, cs.PeerCertificates[0].Raw, own.Certificate[0])
			if err != nil {
				return
			}
			_ = link.WriteFrame(c, &frame{Said: &runbusv1.EnrolFrame_Proof{Proof: &runbusv1.EnrolProof{
				CsrDer: csr, RunnerTime: timestamppb.New(time.Now()),
				Mac: binding.RunnerMAC(schemas.EnrolmentKey(ticket.Token, ticket.RunnerID), csr),
			}}})
			answer := new(frame)
			_ = link.ReadFrame(c, answer)
			answers <- answer
			if answer.GetGrant() != nil {
				_ = link.WriteFrame(c, &frame{Said: &runbusv1.EnrolFrame_Done{Done: &runbusv1.EnrolDone{}}})
			}
		})
		err = p.exchange(t.Context(), addr, p.runner(t, r.ID))
		select {
		case answer := <-answers:
			return answer.GetRefused(), err
		case <-time.After(patience):
			t.Fatalf("no answer came: %v", err)
			return nil, err
		}
	}
	other, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	refused, err := ask(other)
	if err == nil || schemas.CodeOf(err) != schemas.CodeForbidden || !strings.Contains(err.Error(), "for another key than the one of the runner's connection") {
		t.Errorf("a request for another key: %v", err)
	}
	if refused.GetCode() != string(schemas.CodeForbidden) {
		t.Errorf("who asks is told %v", refused)
	}
	p.unspent(t, r.ID)
	if _, err := ask(own.PrivateKey.(signer)); err != nil { // all else was right
		t.Error(err)
	}
}
