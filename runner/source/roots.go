package source

import (
	"os"

	"github.com/org-runink/runbus/schemas"
)

// Roots are the folders of the runner's host below which files may be read (RUNNER_FILE_ROOTS). Nil allows nothing. Safe for
// concurrent use.
type Roots struct{ roots []*root }

type root struct {
	path string
	dir  *os.Root
}

// OpenRoots opens the folders of a list as in PATH. An empty list allows nothing.
func OpenRoots(list string) (*Roots, error) { return &Roots{}, nil }

// Open opens a regular file below one of the roots for reading.
func (r *Roots) Open(path string) (*os.File, error) {
	return nil, schemas.Errorf(schemas.CodeForbidden, "this runner may read no files")
}

// Glob lists the regular files below one of the roots that match the pattern, sorted.
func (r *Roots) Glob(pattern string) ([]string, error) {
	return nil, schemas.Errorf(schemas.CodeForbidden, "this runner may read no files")
}

// Close releases the roots.
func (r *Roots) Close() error { return nil }
