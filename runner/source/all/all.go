// Package all knows every connector of this build.
package all

import (
	"slices"
	"strings"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/runner/source/file"
	httpsource "github.com/org-runink/runbus/runner/source/http"
	"github.com/org-runink/runbus/runner/source/postgres"
	"github.com/org-runink/runbus/runner/source/sqlite"
	"github.com/org-runink/runbus/schemas"
)

var connectors = map[string]source.Connector{}

func init() {
	for _, c := range []source.Connector{file.New(), httpsource.New(), postgres.New(), sqlite.New()} {
		connectors[c.Kind()] = c
	}
}

// Find is the connector of a kind; an unknown one is an error of CodeBadSource that lists the known ones.
func Find(kind string) (source.Connector, error) {
	if c, ok := connectors[kind]; ok {
		return c, nil
	}
	if kind == "" {
		return nil, schemas.Errorf(schemas.CodeBadSource, "no source is named: this runner has %s", strings.Join(Kinds(), ", "))
	}
	return nil, schemas.Errorf(schemas.CodeBadSource, "source kind %q is unknown: this runner has %s", kind, strings.Join(Kinds(), ", "))
}

// Kinds are the kinds of all connectors, sorted.
func Kinds() []string {
	kinds := make([]string, 0, len(connectors))
	for k := range connectors {
		kinds = append(kinds, k)
	}
	slices.Sort(kinds)
	return kinds
}
