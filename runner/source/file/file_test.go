package file

import (
	"bytes"
	"compress/gzip"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/ipc"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/klauspost/compress/zstd"

	"github.com/org-runink/runbus/internal/leak"
	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
)

func TestMain(m *testing.M) { leak.Main(m) }

// result is what a fetch gave.
type result struct {
	schema  *arrow.Schema
	rows    []string // fields joined by |
	notices []string
}

// folder is a root with files.
type folder struct {
	t    testing.TB
	path string
	env  source.Env
}

func newFolder(t testing.TB) *folder {
	t.Helper()
	path := t.TempDir()
	roots, err := source.OpenRoots(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := roots.Close(); err != nil {
			t.Error(err)
		}
	})
	return &folder{t: t, path: path, env: source.Env{Roots: roots}}
}

func (f *folder) write(name string, content string) string {
	f.t.Helper()
	path := filepath.Join(f.path, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		f.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		f.t.Fatal(err)
	}
	return path
}

// fetch reads with settings given in pairs.
func (f *folder) fetch(kv ...string) (result, error) {
	return f.fetchLimited(context.Background(), source.Limits{}, kv...)
}

func (f *folder) fetchLimited(ctx context.Context, l source.Limits, kv ...string) (result, error) {
	f.t.Helper()
	mem := memory.NewCheckedAllocator(memory.DefaultAllocator)
	defer mem.AssertSize(f.t, 0)
	settings := map[string]string{}
	for i := 0; i < len(kv); i += 2 {
		settings[kv[i]] = kv[i+1]
	}
	env := f.env
	env.Memory = mem
	var buf bytes.Buffer
	out := source.NewOutput(&buf, l, nil)
	if err := New().Fetch(ctx, env, source.Request{Settings: settings}, out); err != nil {
		return result{}, err
	}
	if err := out.Close(); err != nil {
		return result{}, err
	}
	r, err := ipc.NewReader(&buf)
	if err != nil {
		return result{}, err
	}
	defer r.Release()
	res := result{schema: r.Schema()}
	for r.Next() {
		b := r.RecordBatch()
		for i := range int(b.NumRows()) {
			var row []string
			for _, c := range b.Columns() {
				if c.IsNull(i) {
					row = append(row, "∅")
				} else {
					row = append(row, c.ValueStr(i))
				}
			}
			res.rows = append(res.rows, strings.Join(row, "|"))
		}
	}
	for _, n := range out.Notices() {
		res.notices = append(res.notices, n.GetMessage())
	}
	return res, r.Err()
}

func (r result) want(t *testing.T, rows ...string) {
	t.Helper()
	if strings.Join(r.rows, "\n") != strings.Join(rows, "\n") {
		t.Errorf("got:\n%s\nwant:\n%s", strings.Join(r.rows, "\n"), strings.Join(rows, "\n"))
	}
}

func wantError(t *testing.T, err error, code schemas.Code, parts ...string) {
	t.Helper()
	if schemas.CodeOf(err) != code {
		t.Errorf("code is %q, want %q: %v", schemas.CodeOf(err), code, err)
		return
	}
	for _, p := range parts {
		if !strings.Contains(err.Error(), p) {
			t.Errorf("%q lacks %q", err, p)
		}
	}
}

func TestTexts(t *testing.T) {
	f := newFolder(t)
	cases := []struct {
		name, content string
		settings      []string
		want          []string
	}{
		{"a.csv", "a,b\n1,x\n", nil, []string{"1|x"}},
		{"A.CSV", "a,b\n1,x\n", nil, []string{"1|x"}},
		{"a.tsv", "a\tb\n1\tx,y\n", nil, []string{"1|x,y"}},
		{"a.data", "a;b\n1;x\n", []string{"format", "csv", "delimiter", ";"}, []string{"1|x"}},
		{"a.jsonl", "{\"a\":1}\n{\"b\":2}\n", nil, []string{"1|∅", "∅|2"}},
		{"a.ndjson", "{\"a\":1}\n", nil, []string{"1"}},
		{"a.json", `{"d":[{"a":1},{"a":2}]}`, []string{"jsonPath", "d"}, []string{"1", "2"}},
		{"a.csv.gz", string(gzipped(t, "a\n1\n")), nil, []string{"1"}},
		{"a.jsonl.zst", string(zstded(t, "{\"a\":1}\n")), nil, []string{"1"}},
		{"a.gzipped", string(gzipped(t, "a\n1\n")), []string{"format", "csv", "compression", "gzip"}, []string{"1"}},
		{"empty.csv", "", nil, nil},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			path := f.write(c.name, c.content)
			for _, p := range []string{path, c.name} { // absolute, and below the first root
				got, err := f.fetch(append([]string{"path", p}, c.settings...)...)
				if err != nil {
					t.Fatal(err)
				}
				got.want(t, c.want...)
			}
		})
	}
}

func gzipped(t testing.TB, s string) []byte {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write([]byte(s)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func zstded(t testing.TB, s string) []byte {
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	}()
	return w.EncodeAll([]byte(s), nil)
}

// The type of a column comes from the whole file when that is read twice, so nothing late can fail to fit.
func TestScan(t *testing.T) {
	f := newFolder(t)
	path := f.write("late.csv", "a,b\n"+strings.Repeat("1,1\n", 20_000)+"007,1.5\n")
	got, err := f.fetch("path", path)
	if err != nil {
		t.Fatal(err)
	}
	if s := got.schema.Field(0).Type.String() + got.schema.Field(1).Type.String(); s != "utf8float64" {
		t.Errorf("types %s", s)
	}
	if len(got.rows) != 20_001 || got.rows[20_000] != "007|1.5" {
		t.Errorf("%d rows, the last is %q", len(got.rows), got.rows[len(got.rows)-1])
	}
	_, err = f.fetch("path", path, "scan", "sample")
	wantError(t, err, schemas.CodeSource, "line 20002", `column "a"`, `"007"`, "10000 rows")
	if !strings.Contains(schemas.ToDetail(err).GetHint(), "types=a:text") {
		t.Errorf("hint %q", schemas.ToDetail(err).GetHint())
	}
	if _, err = f.fetch("path", path, "scan", "sample", "types", "a:text,b:float64"); err != nil {
		t.Error(err)
	}
	if got, err = f.fetch("path", f.write("late.jsonl", strings.Repeat("{\"a\":1}\n", 20_000)+"{\"b\":1}\n")); err != nil || got.schema.NumFields() != 2 || len(got.rows) != 20_001 {
		t.Errorf("%v %v", got.schema, err)
	}
}

func TestPatterns(t *testing.T) {
	f := newFolder(t)
	f.write("m/b.csv", "b,a\n2,y\n")
	f.write("m/a.csv", "a,b\nx,1\n")
	f.write("m/c.txt", "not read")
	got, err := f.fetch("path", "m/*.csv")
	if err != nil {
		t.Fatal(err)
	}
	got.want(t, "x|1", "y|2") // in the order of the names, columns by name
	f.write("m/d.csv", "a,c\nz,3\n")
	for _, scan := range []string{"all", "sample"} {
		_, err = f.fetch("path", "m/*.csv", "scan", scan)
		wantError(t, err, schemas.CodeSource, "m/d.csv", "lacks b", "in addition c")
		got, err = f.fetch("path", "m/*.csv", "union", "true", "scan", scan)
		if err != nil {
			t.Fatal(err)
		}
		got.want(t, "x|1|∅", "y|2|∅", "z|∅|3")
		got, err = f.fetch("path", "m/*.csv", "union", "true", "columns", "c,a", "scan", scan)
		if err != nil {
			t.Fatal(err)
		}
		got.want(t, "∅|x", "∅|y", "3|z")
	}
	f.write("m/e.jsonl", "{}")
	_, err = f.fetch("path", "m/*")
	wantError(t, err, schemas.CodeBadSource, "one format")
	_, err = f.fetch("path", "m/*.parquet")
	wantError(t, err, schemas.CodeSource, "no file matches")
	f.write("m/x[1].csv", "a\n1\n")
	if got, err = f.fetch("path", `m/x\[1\].csv`); err != nil || len(got.rows) != 1 {
		t.Errorf("an escaped pattern: %v %v", got.rows, err)
	}
}

func TestRefusals(t *testing.T) {
	f := newFolder(t)
	f.write("ok.csv", "a\n1\n")
	outside := newFolder(t).write("secret.csv", "a\n1\n")
	if err := os.Symlink(outside, filepath.Join(f.path, "link.csv")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Dir(outside), filepath.Join(f.path, "dir")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(f.path, "folder.csv"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{outside, "link.csv", "dir/secret.csv", "../" + filepath.Base(filepath.Dir(outside)) + "/secret.csv", "x/../../y.csv", "folder.csv", "absent.csv", "/etc/passwd", "/proc/self/environ"} {
		got, err := f.fetch("path", path, "format", "csv")
		if c := schemas.CodeOf(err); c != schemas.CodeForbidden && c != schemas.CodeSource {
			t.Errorf("%s: %v, code %q, %d rows", path, err, c, len(got.rows))
		}
	}
	for _, pattern := range []string{"d*/*.csv", "link*.csv", "../*/*.csv", filepath.Dir(outside) + "/*.csv"} {
		if got, err := f.fetch("path", pattern); err == nil {
			t.Errorf("%s gives %q", pattern, got.rows)
		}
	}
	bad := [][]string{{}, {"path", "ok.csv", "nope", "1"}, {"path", "ok.csv", "format", "xml"}, {"path", "ok.csv", "union", "maybe"}, {"path", "ok.csv\x00"},
		{"path", "ok.unknown"}, {"path", "ok.csv", "jsonPath", "a"}, {"path", "x.parquet", "types", "a:text"}, {"path", "x.parquet", "allText", "true"}, {"path", "x.parquet", "compression", "gzip"}}
	f.write("ok.unknown", "")
	for _, kv := range bad {
		_, err := f.fetch(kv...)
		wantError(t, err, schemas.CodeBadSource)
	}
	err := New().Fetch(context.Background(), f.env, source.Request{Settings: map[string]string{"path": "ok.csv"}, Query: "select 1"}, source.NewOutput(&bytes.Buffer{}, source.Limits{}, nil))
	wantError(t, err, schemas.CodeBadSource, "takes no query")
	err = New().Fetch(context.Background(), f.env, source.Request{Settings: map[string]string{"path": "ok.csv"}, Secrets: map[string]string{"password": "x"}}, source.NewOutput(&bytes.Buffer{}, source.Limits{}, nil))
	wantError(t, err, schemas.CodeBadSource)
	err = New().Fetch(context.Background(), source.Env{}, source.Request{Settings: map[string]string{"path": "ok.csv"}}, source.NewOutput(&bytes.Buffer{}, source.Limits{}, nil))
	wantError(t, err, schemas.CodeForbidden)
}

func TestDamagedCompression(t *testing.T) {
	f := newFolder(t)
	z := gzipped(t, "a\n"+strings.Repeat("12345\n", 10_000))
	f.write("cut.csv.gz", string(z[:len(z)-20]))
	_, err := f.fetch("path", "cut.csv.gz")
	wantError(t, err, schemas.CodeSource, "cut.csv.gz", "gzip")
	f.write("plain.csv.gz", "a\n1\n")
	_, err = f.fetch("path", "plain.csv.gz")
	wantError(t, err, schemas.CodeSource, "gzip")
	if got, err := f.fetch("path", "plain.csv.gz", "compression", "none"); err != nil || len(got.rows) != 1 {
		t.Errorf("%v %v", got.rows, err)
	}
	zs := zstded(t, "a\n"+strings.Repeat("12345\n", 10_000))
	f.write("cut.csv.zst", string(zs[:len(zs)/2]))
	_, err = f.fetch("path", "cut.csv.zst")
	wantError(t, err, schemas.CodeSource, "zstd")
}

func TestLimitsAndCancel(t *testing.T) {
	f := newFolder(t)
	f.write("a.csv", "a\n"+strings.Repeat("1\n", 50_000))
	f.write("b.csv", "a\n"+strings.Repeat("2\n", 50_000))
	got, err := f.fetchLimited(context.Background(), source.Limits{MaxRows: 60_000}, "path", "*.csv")
	if err != nil || len(got.rows) != 60_000 || len(got.notices) != 1 {
		t.Errorf("%d rows, %q, %v", len(got.rows), got.notices, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := f.fetchLimited(ctx, source.Limits{}, "path", "*.csv"); err == nil || ctx.Err() == nil || schemas.CodeOf(err) == schemas.CodeSource {
		t.Errorf("cancelled: %v", err)
	}
}
