package source

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/org-runink/runbus/schemas"
)

// maxMatches bounds what one pattern may match.
const maxMatches = 10_000

// Roots are the folders of the runner's host below which files may be read (RUNNER_FILE_ROOTS). Whatever path is asked for,
// nothing outside of them is opened: no `..`, no symbolic link that leads out, also when somebody changes the folders at the
// same time, since every access goes through os.Root. Only regular files are opened, and opening never blocks. Nil, or no
// root, allows nothing. Safe for concurrent use.
//
// A path is absolute and below a root, or relative: then it is the first root's that has it. Errors have CodeForbidden for
// what may not be read and CodeSource, in the system's words, for what can't.
type Roots struct {
	roots []root
	check func(asked, actual string) error // of By; may be nil
	hints *FileHints                       // of Word; nil: ownHints
}

// FileHints are what to do where a path meets no file that may be read: it depends on who sets the runner up.
type FileHints struct {
	None    string // no folder may be read
	Outside string // the path is in none of them
	Missing string // there is no such file
	NoMatch string // a pattern meets no file
}

var ownHints = FileHints{
	None:    "set RUNNER_FILE_ROOTS on the runner to the folders it may read",
	Outside: "RUNNER_FILE_ROOTS on the runner lists the folders",
	Missing: "the path is one of the runner's host; a relative one begins in a folder of its RUNNER_FILE_ROOTS",
	NoMatch: "the runner sees files below RUNNER_FILE_ROOTS only",
}

// Word has r give these hints instead of those for a runner that its own host sets up. It is called before r is used.
func (r *Roots) Word(hints FileHints) { r.hints = &hints }

// Hints are those that r gives.
func (r *Roots) Hints() FileHints {
	if r == nil || r.hints == nil {
		return ownHints
	}
	return *r.hints
}

type root struct {
	path string // as in the list, cleaned
	real string // with symbolic links resolved
	dir  *os.Root
}

// OpenRoots opens the folders of a list as in PATH. An empty list allows nothing; a folder that is not absolute or can't be
// opened is an error of CodeInvalid.
func OpenRoots(list string) (*Roots, error) {
	r := &Roots{}
	for _, dir := range filepath.SplitList(list) {
		if dir == "" {
			continue
		}
		if !filepath.IsAbs(dir) {
			_ = r.Close()
			return nil, schemas.Errorf(schemas.CodeInvalid, "RUNNER_FILE_ROOTS: %q is not an absolute path", dir)
		}
		dir = filepath.Clean(dir)
		opened, err := os.OpenRoot(dir)
		if err != nil {
			_ = r.Close()
			return nil, schemas.Errorf(schemas.CodeInvalid, "RUNNER_FILE_ROOTS: %w", err)
		}
		resolved, err := filepath.EvalSymlinks(dir)
		if err != nil {
			_ = opened.Close()
			_ = r.Close()
			return nil, schemas.Errorf(schemas.CodeInvalid, "RUNNER_FILE_ROOTS: %w", err)
		}
		r.roots = append(r.roots, root{path: dir, real: resolved, dir: opened})
	}
	return r, nil
}

// By is r with one check more: before a file is read, check gets its path as it was asked for, absolute and clean, and its real
// path with every symbolic link resolved, and its error is returned. The result shares the folders of r and must not be closed.
func (r *Roots) By(check func(asked, actual string) error) *Roots {
	if r == nil || len(r.roots) == 0 { // nothing is read
		return r
	}
	return &Roots{roots: r.roots, check: check, hints: r.hints}
}

// permit asks the check of By about a file that exists, and returns the file's real path and identity there.
func (r *Roots) permit(at root, rel, name string) (string, fs.FileInfo, error) {
	resolved, err := filepath.EvalSymlinks(filepath.Join(at.real, rel))
	if err != nil {
		return "", nil, r.fileError("open", name, err)
	}
	now, err := os.Lstat(resolved)
	if err != nil {
		return "", nil, r.fileError("open", name, err)
	}
	if r.check != nil {
		if err := r.check(filepath.Join(at.path, rel), resolved); err != nil {
			return "", nil, err
		}
	}
	return resolved, now, nil
}

// Close releases the roots: nothing can be opened from then on. Files opened before stay open.
func (r *Roots) Close() error {
	if r == nil {
		return nil
	}
	var errs []error
	for _, root := range r.roots {
		errs = append(errs, root.dir.Close())
	}
	return errors.Join(errs...)
}

// Open opens a regular file for reading.
func (r *Roots) Open(name string) (*os.File, error) {
	at, rel, err := r.find(name)
	if err != nil {
		return nil, err
	}
	// The kind is asked before, because opening a device can act on it, and after, because the name can change meanwhile.
	if _, err := r.regular(at, rel, name); err != nil {
		return nil, err
	}
	f, err := at.dir.OpenFile(rel, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, r.fileError("open", name, err)
	}
	info, err := f.Stat()
	if err != nil {
		_ = f.Close()
		return nil, r.fileError("open", name, err)
	}
	if !info.Mode().IsRegular() {
		_ = f.Close()
		return nil, notRegular(name, info)
	}
	if r.check != nil {
		_, now, err := r.permit(at, rel, name)
		if err == nil && !os.SameFile(info, now) {
			err = changed(name)
		}
		if err != nil {
			_ = f.Close()
			return nil, err
		}
	}
	return f, nil
}

// Glob lists the regular files that match a pattern (path.Match syntax in each part; `**` has no meaning of its own), as
// absolute paths, sorted. A path without a wildcard, or that exists literally, stands for itself. Folders that match are left
// out, and so is what is behind a folder that can't be listed. Nothing matched, a match that is neither file nor folder or a
// symbolic link that leads out, and over 10,000 matches are errors: no match is left out in silence.
func (r *Roots) Glob(pattern string) ([]string, error) {
	if !strings.ContainsAny(pattern, `*?[\`) {
		return r.literal(pattern)
	}
	if found, err := r.literal(pattern); err == nil {
		return found, nil
	}
	places, err := r.places(pattern)
	if err != nil {
		return nil, err
	}
	var found []string
	for _, place := range places {
		matches, err := fs.Glob(listing{place.root.dir}, filepath.ToSlash(place.rel))
		if errors.Is(err, path.ErrBadPattern) {
			return nil, schemas.Errorf(schemas.CodeBadSource, "%q is not a valid file pattern", clip(pattern, 200))
		}
		if err != nil {
			return nil, r.fileError("list", pattern, err)
		}
		if len(matches) > maxMatches {
			return nil, schemas.Errorf(schemas.CodeBadSource, "%q matches %d files: at most %d are read at once", clip(pattern, 200), len(matches), maxMatches)
		}
		for _, match := range matches {
			name := filepath.Join(place.root.path, filepath.FromSlash(match))
			info, err := place.root.dir.Stat(filepath.FromSlash(match))
			switch {
			case err != nil:
				return nil, r.fileError("open", name, err)
			case info.IsDir():
			case !info.Mode().IsRegular():
				return nil, notRegular(name, info)
			default:
				if r.check != nil {
					if _, _, err := r.permit(place.root, filepath.FromSlash(match), name); err != nil {
						return nil, err
					}
				}
				found = append(found, name)
			}
		}
		if len(found) > 0 {
			break
		}
	}
	if len(found) == 0 {
		return nil, schemas.Errorf(schemas.CodeSource, "no file matches %q", clip(pattern, 200))
	}
	slices.Sort(found)
	return found, nil
}

// listing is a root as fs.Glob needs it. It opens folders only, and never blocks: the one of os.Root would wait at a pipe.
type listing struct{ dir *os.Root }

// Open is not used by fs.Glob, since there are Stat and ReadDir.
func (l listing) Open(name string) (fs.File, error) {
	return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrPermission}
}

// Stat follows symbolic links within the root.
func (l listing) Stat(name string) (fs.FileInfo, error) { return l.dir.Stat(filepath.FromSlash(name)) }

// ReadDir lists a folder, sorted.
func (l listing) ReadDir(name string) ([]fs.DirEntry, error) {
	if info, err := l.Stat(name); err != nil || !info.IsDir() {
		return nil, errors.Join(err, fs.ErrInvalid)
	}
	f, err := l.dir.OpenFile(filepath.FromSlash(name), os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	entries, err := f.ReadDir(-1)
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return entries, err
}

func (r *Roots) literal(name string) ([]string, error) {
	at, rel, err := r.find(name)
	if err != nil {
		return nil, err
	}
	if _, err := r.regular(at, rel, name); err != nil {
		return nil, err
	}
	if r.check != nil {
		if _, _, err := r.permit(at, rel, name); err != nil {
			return nil, err
		}
	}
	return []string{filepath.Join(at.path, rel)}, nil
}

// Resolve is for a reader that can only open by path, as SQLite: the path of a regular file with every symbolic link
// resolved, and the file's identity. The path can be changed by somebody with write access to the root before it is opened:
// the reader must compare what it has opened with the identity (os.SameFile) before it reads.
func (r *Roots) Resolve(name string) (string, fs.FileInfo, error) {
	at, rel, err := r.find(name)
	if err != nil {
		return "", nil, err
	}
	info, err := r.regular(at, rel, name)
	if err != nil {
		return "", nil, err
	}
	resolved, now, err := r.permit(at, rel, name)
	if err != nil {
		return "", nil, err
	}
	if _, inside := below(at.real, resolved); !inside || !os.SameFile(info, now) {
		return "", nil, changed(name)
	}
	return resolved, info, nil
}

func changed(name string) error {
	return schemas.Errorf(schemas.CodeForbidden, "%q was changed while it was opened", clip(name, 200))
}

// regular is the identity of a regular file.
func (r *Roots) regular(at root, rel, name string) (fs.FileInfo, error) {
	info, err := at.dir.Stat(rel)
	if err != nil {
		return nil, r.fileError("open", name, err)
	}
	if !info.Mode().IsRegular() {
		return nil, notRegular(name, info)
	}
	return info, nil
}

type place struct {
	root root
	rel  string
}

// find is the root that a path belongs to, and the path below it. The file need not exist.
func (r *Roots) find(name string) (root, string, error) {
	places, err := r.places(name)
	if err != nil {
		return root{}, "", err
	}
	for _, p := range places {
		if _, err := p.root.dir.Lstat(p.rel); err == nil {
			return p.root, p.rel, nil
		}
	}
	return places[0].root, places[0].rel, nil
}

// places are the roots a path may belong to, at least one.
func (r *Roots) places(name string) ([]place, error) {
	switch {
	case r == nil || len(r.roots) == 0:
		return nil, schemas.Errorf(schemas.CodeForbidden, "this runner may read no files").
			WithHint(r.Hints().None)
	case name == "" || strings.ContainsRune(name, 0):
		return nil, schemas.Errorf(schemas.CodeBadSource, "the file path is empty or has a NUL")
	}
	for _, part := range strings.FieldsFunc(name, func(c rune) bool { return c == '/' || c == filepath.Separator }) {
		if part == ".." {
			return nil, schemas.Errorf(schemas.CodeForbidden, "the file path %q has a `..` in it", clip(name, 200))
		}
	}
	var places []place
	for _, root := range r.roots {
		if !filepath.IsAbs(name) {
			places = append(places, place{root, filepath.Clean(name)})
		} else if rel, ok := below(root.path, filepath.Clean(name)); ok {
			places = append(places, place{root, rel})
		} else if rel, ok := below(root.real, filepath.Clean(name)); ok {
			places = append(places, place{root, rel})
		}
	}
	if len(places) == 0 {
		return nil, schemas.Errorf(schemas.CodeForbidden, "%q is not below a folder this runner may read", clip(name, 200)).
			WithHint(r.Hints().Outside)
	}
	return places, nil
}

// below returns name relative to dir if it is in there. Both are clean and absolute.
func below(dir, name string) (string, bool) {
	if name == dir {
		return ".", true
	}
	return strings.CutPrefix(name, strings.TrimSuffix(dir, string(filepath.Separator))+string(filepath.Separator))
}

func notRegular(name string, info fs.FileInfo) error {
	kind := "a device"
	switch mode := info.Mode(); {
	case mode.IsDir():
		kind = "a folder"
	case mode&fs.ModeNamedPipe != 0:
		kind = "a pipe"
	case mode&fs.ModeSocket != 0:
		kind = "a socket"
	}
	return schemas.Errorf(schemas.CodeForbidden, "%q is %s, not a regular file", clip(name, 200), kind)
}

// fileError is the system's reason under the name that was asked for.
func (r *Roots) fileError(op, name string, err error) error {
	reason := err
	var failed *fs.PathError
	if errors.As(err, &failed) {
		reason = failed.Err
	}
	// os.Root has no exported error for this; the text is checked by a test.
	if strings.Contains(reason.Error(), "escapes from parent") {
		return schemas.Errorf(schemas.CodeForbidden, "%q leads out of the folders this runner may read, through a symbolic link", clip(name, 200))
	}
	failure := schemas.Errorf(schemas.CodeSource, "%s %s: %w", op, clip(name, 200), reason)
	if errors.Is(reason, fs.ErrNotExist) {
		return failure.WithHint(r.Hints().Missing)
	}
	return failure
}
