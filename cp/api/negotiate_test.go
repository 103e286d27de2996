package api

import (
	"errors"
	"net/http"
	"testing"

	"github.com/danielgtaylor/huma/v2"
)

func TestNegotiate(t *testing.T) {
	for accept, want := range map[string]string{
		"":                              mediaNDJSON,
		" ":                             mediaNDJSON,
		"*/*":                           mediaNDJSON,
		"application/json":              mediaNDJSON,
		"application/*":                 mediaNDJSON,
		"application/x-ndjson":          mediaNDJSON,
		"text/csv":                      mediaCSV,
		"TEXT/CSV; header=present":      mediaCSV,
		"text/*":                        mediaCSV,
		mediaArrow:                      mediaArrow,
		"text/html, */*;q=0.1":          mediaNDJSON,
		"text/csv;q=0.5, " + mediaArrow: mediaArrow,
		"text/csv, " + mediaArrow:       mediaCSV,
		"text/csv;q=0.5," + mediaArrow + ";q=0.7": mediaArrow,
		"text/csv;q=0, */*":                       mediaNDJSON,
		"text/html":                               "",
		"application/xml":                         "",
		"text/csv;q=0":                            "",
		"text/csv;q=x":                            "",
		"text/csv;q=NaN":                          "",
		"text/csv;q=2":                            "",
		",;,":                                     "",
	} {
		got, err := negotiate(accept)
		var problem huma.StatusError
		if got != want || want == "" && (!errors.As(err, &problem) || problem.GetStatus() != http.StatusNotAcceptable) || want != "" && err != nil {
			t.Errorf("%q: %q, %v; want %q", accept, got, err, want)
		}
	}
}

func FuzzNegotiate(f *testing.F) {
	for _, s := range []string{"", "text/csv;q=0.5, */*", "a/b;q=", ";;,q=1,", mediaArrow + ";q=1e309"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, accept string) {
		got, err := negotiate(accept)
		if (got == "") != (err != nil) {
			t.Fatalf("%q, %v", got, err)
		}
		if got != "" && got != mediaNDJSON && got != mediaArrow && got != mediaCSV {
			t.Fatalf("%q", got)
		}
	})
}
