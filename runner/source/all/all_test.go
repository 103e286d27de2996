package all_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/org-runink/runbus/runner/source/all"
	"github.com/org-runink/runbus/schemas"
)

func TestFind(t *testing.T) {
	if got, want := all.Kinds(), []string{"file", "http", "postgres", "sqlite"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	for _, kind := range all.Kinds() {
		if c, err := all.Find(kind); err != nil || c.Kind() != kind {
			t.Errorf("%s: %v %v", kind, c, err)
		}
	}
	for _, kind := range []string{"", "mysql", "SQLite", "sqlite "} {
		var e *schemas.Error
		if _, err := all.Find(kind); !errors.As(err, &e) || e.Code != schemas.CodeBadSource || !strings.Contains(e.Message, "file, http, postgres, sqlite") {
			t.Errorf("%q: %v", kind, err)
		}
	}
}
