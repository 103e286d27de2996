package api

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
)

// Whatever is wrong with a body, the answer doesn't repeat what is in it.
func TestRefusalsRepeatNoSecret(t *testing.T) {
	useProblems.Do(func() { huma.NewError = humaProblem })
	mux := http.NewServeMux()
	api := humago.New(mux, huma.DefaultConfig("test", "0"))
	huma.Post(api, "/api/fetches", func(context.Context, *runFetchInput) (*struct{}, error) { return &struct{}{}, nil })
	const canary = "c4nary"
	for name, body := range map[string]string{
		"not JSON":        `{"secrets":{"password":"` + canary + `"},}`,
		"not an object":   `"` + canary + `"`,
		"wrong type":      `{"secrets":["` + canary + `"]}`,
		"nested":          `{"secrets":{"password":{"value":"` + canary + `"}}}`,
		"unknown field":   `{"secret":{"password":"` + canary + `"}}`,
		"wrong elsewhere": `{"maxRows":-1,"secrets":{"password":"` + canary + `"}}`,
		"number":          `{"maxRows":"` + canary + `"}`,
	} {
		req := httptest.NewRequest(http.MethodPost, "/api/fetches", strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, req)
		text, err := io.ReadAll(w.Result().Body)
		if err != nil {
			t.Fatal(err)
		}
		if w.Code < 400 || strings.Contains(string(text), canary) {
			t.Errorf("%s: %d %s", name, w.Code, text)
		}
	}
}
