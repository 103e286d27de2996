package api

import (
	"bytes"
	"encoding/json"
	"flag"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

var update = flag.Bool("update", false, "write docs/openapi.json anew")

// document is the OpenAPI document as the API serves it, indented.
func document(t *testing.T) []byte {
	t.Helper()
	rec := httptest.NewRecorder()
	New(Deps{Metrics: prometheus.NewRegistry(), Version: "0.0.0-dev"}).ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/openapi.json", nil))
	if rec.Code != http.StatusOK || !strings.Contains(rec.Header().Get("Content-Type"), "json") {
		t.Fatalf("%d %s", rec.Code, rec.Header().Get("Content-Type"))
	}
	var out bytes.Buffer
	if err := json.Indent(&out, rec.Body.Bytes(), "", "  "); err != nil {
		t.Fatal(err)
	}
	out.WriteByte('\n')
	return out.Bytes()
}

// docs/openapi.json is what this build serves.
func TestOpenAPIIsCommitted(t *testing.T) {
	file := filepath.Join("..", "..", "docs", "openapi.json")
	got := document(t)
	if *update {
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("docs/openapi.json is stale: run `make openapi` and commit it")
	}
}

// The document says what generators of clients need: a version, the credential, each operation's id, answers and errors, and
// no reference leads nowhere.
func TestOpenAPIIsValid(t *testing.T) {
	type operation struct {
		OperationID string             `json:"operationId"`
		Summary     string             `json:"summary"`
		Tags        []string           `json:"tags"`
		Security    []map[string][]any `json:"security"`
		Responses   map[string]struct {
			Description string              `json:"description"`
			Content     map[string]struct{} `json:"content"`
		} `json:"responses"`
	}
	var doc struct {
		OpenAPI    string                          `json:"openapi"`
		Info       struct{ Title, Version string } `json:"info"`
		Paths      map[string]map[string]operation `json:"paths"`
		Components struct {
			Schemas         map[string]json.RawMessage `json:"schemas"`
			SecuritySchemes map[string]struct{ Type, Scheme string }
		} `json:"components"`
	}
	b := document(t)
	if err := json.Unmarshal(b, &doc); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(doc.OpenAPI, "3.1.") || doc.Info.Title != "Runbus" || doc.Info.Version == "" {
		t.Errorf("%s, %+v", doc.OpenAPI, doc.Info)
	}
	if s := doc.Components.SecuritySchemes["session"]; s.Type != "http" || s.Scheme != "bearer" {
		t.Errorf("security schemes %+v", doc.Components.SecuritySchemes)
	}
	ids := map[string]bool{}
	for path, methods := range doc.Paths {
		for method, op := range methods {
			where := method + " " + path
			if op.OperationID == "" || ids[op.OperationID] || op.Summary == "" || len(op.Tags) != 1 {
				t.Errorf("%s: %+v", where, op)
			}
			ids[op.OperationID] = true
			if len(op.Security) != 1 || op.Security[0]["session"] == nil {
				t.Errorf("%s needs no session", where)
			}
			succeeds := false
			for status, r := range op.Responses {
				succeeds = succeeds || status[0] == '2'
				switch {
				case r.Description == "":
					t.Errorf("%s: %s has no description", where, status)
				case status == "401":
					if _, ok := r.Content["application/json"]; !ok {
						t.Errorf("%s: 401 is %v, and the body is %q", where, r.Content, `{"error":"unauthorized"}`)
					}
				case status[0] == '4' || status[0] == '5':
					if _, ok := r.Content["application/problem+json"]; !ok {
						t.Errorf("%s: %s is no problem: %v", where, status, r.Content)
					}
				}
			}
			if !succeeds {
				t.Errorf("%s never succeeds: %v", where, op.Responses)
			}
		}
	}
	for _, part := range strings.Split(string(b), `"$ref": "`)[1:] {
		ref, _, _ := strings.Cut(part, `"`)
		name, ok := strings.CutPrefix(ref, "#/components/schemas/")
		if _, there := doc.Components.Schemas[name]; !ok || !there {
			t.Errorf("the reference %s leads nowhere", ref)
		}
	}
}
