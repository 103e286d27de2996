package source

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

// tree makes two roots beside a folder that is none, with links of every kind.
func tree(t *testing.T) (dir string, roots *Roots) {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{"a/sub", "b", "out", "ab"} {
		must(os.MkdirAll(filepath.Join(dir, d), 0o755))
	}
	for _, f := range []string{"a/1.csv", "a/2.csv", "a/[x].csv", "a/sub/3.csv", "b/4.csv", "b/1.csv", "out/secret.csv", "ab/5.csv"} {
		must(os.WriteFile(filepath.Join(dir, f), []byte(f), 0o644))
	}
	must(os.Symlink("sub/3.csv", filepath.Join(dir, "a/in.lnk")))
	must(os.Symlink("../out/secret.csv", filepath.Join(dir, "a/out.lnk")))
	must(os.Symlink(filepath.Join(dir, "out"), filepath.Join(dir, "a/outdir")))
	must(os.Symlink(filepath.Join(dir, "a"), filepath.Join(dir, "link")))
	must(os.Symlink("gone", filepath.Join(dir, "a/dangling.lnk")))
	must(syscall.Mkfifo(filepath.Join(dir, "a/pipe"), 0o644))
	roots, err = OpenRoots(filepath.Join(dir, "link") + string(os.PathListSeparator) + string(os.PathListSeparator) + filepath.Join(dir, "b") + "/")
	must(err)
	t.Cleanup(func() { must(roots.Close()) })
	return dir, roots
}

func TestRootsOpen(t *testing.T) {
	dir, roots := tree(t)
	for name, content := range map[string]string{
		dir + "/link/1.csv":     "a/1.csv",
		dir + "/a/1.csv":        "a/1.csv", // the root under its real name
		dir + "/a/./sub//3.csv": "a/sub/3.csv",
		dir + "/a/in.lnk":       "a/sub/3.csv",
		dir + "/b/4.csv":        "b/4.csv",
		"1.csv":                 "a/1.csv",
		"4.csv":                 "b/4.csv",
		"sub/3.csv":             "a/sub/3.csv",
	} {
		f, err := roots.Open(name)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got, err := io.ReadAll(f); err != nil || string(got) != content {
			t.Errorf("%s: %q %v", name, got, err)
		}
		_ = f.Close()
		if path, info, err := roots.Resolve(name); err != nil || path != filepath.Join(dir, content) || !info.Mode().IsRegular() {
			t.Errorf("resolve %s: %q %v", name, path, err)
		}
	}
}

func TestRootsRefuse(t *testing.T) {
	dir, roots := tree(t)
	for name, want := range map[string]struct {
		code schemas.Code
		text string
	}{
		dir + "/out/secret.csv":      {schemas.CodeForbidden, "not below a folder"},
		dir + "/ab/5.csv":            {schemas.CodeForbidden, "not below a folder"},
		"/etc/passwd":                {schemas.CodeForbidden, "not below a folder"},
		dir + "/a/../out/secret.csv": {schemas.CodeForbidden, "`..`"},
		"../out/secret.csv":          {schemas.CodeForbidden, "`..`"},
		"sub/..":                     {schemas.CodeForbidden, "`..`"},
		dir + "/a/out.lnk":           {schemas.CodeForbidden, "symbolic link"},
		"outdir/secret.csv":          {schemas.CodeForbidden, "symbolic link"},
		"pipe":                       {schemas.CodeForbidden, "a pipe, not a regular file"},
		"sub":                        {schemas.CodeForbidden, "a folder, not a regular file"},
		dir + "/a":                   {schemas.CodeForbidden, "a folder, not a regular file"},
		".":                          {schemas.CodeForbidden, "a folder, not a regular file"},
		"gone.csv":                   {schemas.CodeSource, "no such file"},
		"dangling.lnk":               {schemas.CodeSource, "no such file"},
		"":                           {schemas.CodeBadSource, "empty"},
		"a\x00b":                     {schemas.CodeBadSource, "NUL"},
	} {
		check := func(what string, err error) {
			t.Helper()
			if schemas.CodeOf(err) != want.code || !strings.Contains(err.Error(), want.text) {
				t.Errorf("%s %q: %v (%s), want %s %q", what, name, err, schemas.CodeOf(err), want.code, want.text)
			}
		}
		_, err := roots.Open(name)
		check("open", err)
		_, _, err = roots.Resolve(name)
		check("resolve", err)
		_, err = roots.Glob(name)
		check("glob", err)
	}
	if _, err := roots.Open("gone.csv"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v is not fs.ErrNotExist", err)
	}
}

func TestRootsGlob(t *testing.T) {
	dir, roots := tree(t)
	for pattern, want := range map[string][]string{
		"*.csv":             {"link/1.csv", "link/2.csv", "link/[x].csv"},
		dir + "/b/*.csv":    {"b/1.csv", "b/4.csv"},
		dir + "/a/[12].csv": {"link/1.csv", "link/2.csv"},
		"[x].csv":           {"link/[x].csv"}, // it exists literally
		"*/*.csv":           {"link/sub/3.csv"},
		"4.*":               {"b/4.csv"},
		"s*":                nil,
		"*.none":            nil,
		"1.csv":             {"link/1.csv"},
		"in.*":              {"link/in.lnk"},
	} {
		got, err := roots.Glob(pattern)
		for i := range got {
			got[i] = strings.TrimPrefix(got[i], dir+"/")
		}
		if !slices.Equal(got, want) || (err == nil) != (len(want) > 0) {
			t.Errorf("%s: %v %v, want %v", pattern, got, err, want)
		}
		if len(want) == 0 && schemas.CodeOf(err) != schemas.CodeSource {
			t.Errorf("%s: %v", pattern, err)
		}
	}
	for pattern, code := range map[string]schemas.Code{
		"out*":                schemas.CodeForbidden, // out.lnk and outdir lead out
		"p*":                  schemas.CodeForbidden, // a pipe
		"../*.csv":            schemas.CodeForbidden,
		dir + "/out/*.csv":    schemas.CodeForbidden,
		dir + "/*/secret.csv": schemas.CodeForbidden,
		"outdir/*.csv":        schemas.CodeSource,
		"[":                   schemas.CodeBadSource,
		"dangling*":           schemas.CodeSource,
	} {
		if got, err := roots.Glob(pattern); schemas.CodeOf(err) != code {
			t.Errorf("%s: %v %v, want %s", pattern, got, err, code)
		}
	}
}

func TestRootsOfNothing(t *testing.T) {
	empty, err := OpenRoots("")
	if err != nil {
		t.Fatal(err)
	}
	for _, roots := range []*Roots{nil, empty} {
		_, open := roots.Open("/etc/hostname")
		_, glob := roots.Glob("/etc/*")
		_, _, resolve := roots.Resolve("/etc/hostname")
		for _, err := range []error{open, glob, resolve} {
			if schemas.CodeOf(err) != schemas.CodeForbidden || !strings.Contains(err.Error(), "may read no files") {
				t.Error(err)
			}
		}
		if err := roots.Close(); err != nil {
			t.Error(err)
		}
	}
	for _, list := range []string{"relative", "/does/not/exist", "/etc/passwd", ":/etc:relative"} {
		if r, err := OpenRoots(list); schemas.CodeOf(err) != schemas.CodeInvalid || r != nil {
			t.Errorf("%s: %v", list, err)
		}
	}
	whole, err := OpenRoots("/")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = whole.Close() }()
	if f, err := whole.Open("/dev/null"); schemas.CodeOf(err) != schemas.CodeForbidden {
		t.Errorf("/dev/null: %v %v", f, err)
	}
}
