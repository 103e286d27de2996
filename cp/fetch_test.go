package cp

import (
	"os"
	"strings"
	"testing"

	"github.com/org-runink/runbus/cp/dispatch"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// deafSink takes nothing: it fails the test when it is given something.
type deafSink struct{ t *testing.T }

func (s deafSink) given() error {
	s.t.Error("the sink was given something")
	return nil
}

func (s deafSink) Accepted(dispatch.Accepted) error        { return s.given() }
func (s deafSink) Progress(*runbusv1.RunFetchUpdate) error { return s.given() }
func (s deafSink) Chunk([]byte) error                      { return s.given() }
func (s deafSink) Abandon()                                {}

func TestFetchWithinTheProcess(t *testing.T) {
	c := start(t, testConfig(t, private(t)))
	defer c.Stop()
	token, err := os.ReadFile(c.Endpoints().AdminToken)
	if err != nil {
		t.Fatal(err)
	}
	req := dispatch.Request{Runner: "nobody", Fetch: &runbusv1.RunFetchRequest{Source: &runbusv1.Source{Kind: "file"}}}
	if _, err := c.Fetch(t.Context(), "rst1.garbage", req, deafSink{t}); schemas.CodeOf(err) != schemas.CodeUnauthorized {
		t.Errorf("a token that is none: %v", err)
	}
	o, err := c.Fetch(t.Context(), strings.TrimSpace(string(token)), req, deafSink{t})
	if err != nil || o.Code != dispatch.OutcomeRefused || schemas.CodeOf(o.Err) != schemas.CodeRunnerUnknown {
		t.Errorf("an unknown runner: %s %v %v", o.Code, o.Err, err)
	}
}
