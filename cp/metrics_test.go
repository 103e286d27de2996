package cp_test

import (
	"bytes"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// O7: /metrics is what Prometheus' own parser and linter take, no label may grow with tenants, runners or dispatches, and
// docs/operations.md names every metric of this platform, and none that is not there.
func TestMetricsFollowTheConventions(t *testing.T) {
	s := newScene(t)
	s.call(t, writer, http.MethodPost, "/api/fetches", `{"runnerId":"ghost","source":{"kind":"file"}}`)
	body := s.call(t, nobody, http.MethodGet, "/metrics", "").body
	problems, err := promlint.New(bytes.NewReader(body)).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	labels := []string{"outcome", "code", "reason", "result", "le", "version", "goversion"}
	var ours []string
	for name, family := range families {
		if !strings.HasPrefix(name, "runbus_") {
			continue
		}
		ours = append(ours, name)
		if help := family.GetHelp(); len(help) < 10 || !strings.HasSuffix(help, ".") {
			t.Errorf("%s: HELP %q", name, help)
		}
		for _, m := range family.GetMetric() {
			for _, l := range m.GetLabel() {
				if !slices.Contains(labels, l.GetName()) {
					t.Errorf("%s has a label %q", name, l.GetName())
				}
			}
		}
		if len(family.GetMetric()) > 200 {
			t.Errorf("%s has %d series", name, len(family.GetMetric()))
		}
	}
	docs, err := os.ReadFile("../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	var documented []string
	for _, row := range regexp.MustCompile("(?m)^\\| `(runbus_[a-z_]+)").FindAllSubmatch(docs, -1) {
		documented = append(documented, string(row[1]))
	}
	slices.Sort(ours)
	slices.Sort(documented)
	// A counter with labels that was never counted has no series yet.
	for _, name := range ours {
		if !slices.Contains(documented, name) {
			t.Errorf("docs/operations.md does not tell of %s", name)
		}
	}
	for _, name := range documented {
		if !slices.Contains(ours, name) {
			t.Errorf("docs/operations.md tells of %s, which is not there", name)
		}
	}
}
