package httpsource

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

func TestPaging(t *testing.T) {
	foreign := server(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, `[{"n":9%s}]`, strings.Repeat("0", len(r.Header.Get("Authorization"))))
	})
	s := server(t, func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		if q.Get("keep") != "a b" {
			t.Errorf("the query is %q", r.URL.RawQuery)
		}
		link := func(to string) { w.Header().Add("Link", `</x>; rel="prev", <`+to+`>; rel="last next"`) }
		n := q.Get("page") + q.Get("p") + q.Get("after")
		switch r.URL.Path {
		case "/link":
			if n != "3" {
				link("?keep=a+b&page=" + map[string]string{"": "2", "2": "3"}[n])
			}
			fmt.Fprintf(w, `[{"n":"<%s>"}]`, n)
		case "/linkloop":
			link("/linkloop?keep=a+b&page=" + map[string]string{"": "2", "2": "1", "1": "2"}[n])
			_, _ = io.WriteString(w, `[{"n":1}]`)
		case "/linkforeign":
			link(foreign.URL + "/")
			_, _ = io.WriteString(w, `[{"n":1}]`)
		case "/body":
			next := "null"
			if n == "" {
				next = `"/body?keep=a+b&page=2"`
			}
			fmt.Fprintf(w, `{"links":{"next":%s},"items":[{"n":"<%s>"}]}`, next, n)
		case "/page", "/csv":
			rows := map[string]string{"1": "x", "2": "y", "7": "z"}[n]
			if r.URL.Path == "/csv" {
				fmt.Fprintf(w, "n\n%s\n", rows)
				return
			}
			if rows == "" {
				_, _ = io.WriteString(w, "[]")
				return
			}
			fmt.Fprintf(w, `[{"n":%q}]`, rows)
		case "/pageloop":
			_, _ = io.WriteString(w, `[{"n":1}]`)
		case "/cursor":
			next := map[string]string{"": `"c/1 &"`, "c/1 &": "17", "17": `""`}[n]
			fmt.Fprintf(w, `{"items":[{"n":%q}],"meta":{"next":%s}}`, n, next)
		case "/cursorloop":
			next := map[string]string{"": "1", "1": "2", "2": "1"}[n]
			fmt.Fprintf(w, `{"meta":{"next":%s},"items":[{"n":%q}]}`, next, n)
		}
	})
	cursor := []string{"paging", "cursor", "jsonPath", "items", "cursorPath", "meta.next", "cursorParam", "after"}
	cases := []struct {
		path   string
		kv     []string
		want   []string
		failed string
	}{
		{"/link", []string{"paging", "link"}, []string{"<>", "<2>", "<3>"}, ""},
		{"/linkloop", []string{"paging", "link"}, nil, "go round"},
		{"/linkforeign", []string{"paging", "link"}, nil, "another origin"},
		{"/linkforeign", []string{"paging", "link", "crossOrigin", "anonymous", "auth", "bearer", "secret.token", "t0k3n-abc"}, []string{"1", "9"}, ""},
		{"/body", []string{"paging", "link", "jsonPath", "items", "nextPath", "links.next"}, []string{"<>", "<2>"}, ""},
		{"/page", []string{"paging", "page"}, []string{"x", "y"}, ""},
		{"/page", []string{"paging", "page", "pageParam", "p", "pageStart", "7"}, []string{"z"}, ""},
		{"/pageloop", []string{"paging", "page"}, nil, "are the same"},
		{"/cursor", cursor, []string{"", "c/1 &", "17"}, ""},
		{"/cursorloop", cursor, nil, "go round"},
	}
	for _, c := range cases {
		got, err := fetch(t, append([]string{"url", s.URL + c.path + "?keep=a+b"}, c.kv...)...)
		if c.failed != "" {
			wantError(t, err, schemas.CodeSource, c.failed)
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.path, err)
			continue
		}
		got.want(t, c.want...)
		if len(got.dials) > 2 {
			t.Errorf("%s: the connection is not kept: %d dials", c.path, len(got.dials))
		}
	}
	got, err := fetch(t, "url", s.URL+"/link?keep=a+b", "paging", "link", "maxPages", "2")
	if err != nil || len(got.notices) != 1 || !strings.Contains(got.notices[0], "maxPages=2") {
		t.Errorf("%q %q %v", got.rows, got.notices, err)
	}
	got.want(t, "<>", "<2>")
}

func TestNextLink(t *testing.T) {
	cases := map[string]string{
		``:                    "",
		`<a>; rel=next`:       "a",
		`<a>; rel="next"`:     "a",
		`<a>;rel="prev NEXT"`: "a",
		`<a>; rel="nextish"`:  "",
		`<a,b;c>; title="x, <y>; rel=next"; rel=next`: "a,b;c",
		`<a>; rel=prev, <b>; rel=next`:                "b",
		`, ,<b>; rel=next`:                            "b",
		`<a>; rel=prev; rel=next`:                     "",
		`<a>; anchor="#x"; rel=next`:                  "",
		`<a>; flag; rel = "next"`:                     "a",
		`<a>; t="q\"uoted"; rel=next`:                 "a",
		`<a; rel=next`:                                "",
		`a; rel=next`:                                 "",
		`<a>; t="open; rel=next`:                      "",
		`<>; rel=next`:                                "",
	}
	for s, want := range cases {
		if got := nextLink([]string{s}); got != want {
			t.Errorf("%s: %q, want %q", s, got, want)
		}
	}
	if got := nextLink([]string{`<a>; rel=prev`, `<b>; rel=next`}); got != "b" {
		t.Errorf("two headers: %q", got)
	}
}

func FuzzNextLink(f *testing.F) {
	for _, s := range []string{`<a>; rel="next"`, `<a>; x="\""; rel=next, <b>`, `<`, `<a>;`, `<a>;=`, `<a>; rel="`, `<a>; rel="\`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if link := nextLink([]string{s}); link != "" && !strings.Contains(s, link) {
			t.Fatalf("%q is not in %q", link, s)
		}
	})
}
