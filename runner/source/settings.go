package source

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/org-runink/runbus/schemas"
)

// Spec declares what a kind of source accepts. A connector has one, as a package variable, and reads every request
// through it.
type Spec struct {
	Kind     string
	Settings []Setting
	Secrets  []Setting
	// Query says what the query means: QueryNone, QueryText or QuerySQL.
	Query QueryRule
	// Dialect is whose rules a QuerySQL query is checked by.
	Dialect Dialect
}

// QueryRule says what a connector does with Request.Query.
type QueryRule int

// The rules for a query.
const (
	QueryNone QueryRule = iota // the kind has no query; one is refused
	QueryText                  // optional, the connector's own language
	QuerySQL                   // required, must be read-only by the Dialect
)

// Setting is one named setting or secret of a Spec.
type Setting struct {
	Name     string
	Required bool   // an empty value counts as missing
	Default  string // used when absent or empty
	// Check refuses a value with a reason that follows the name, as in `must be a number`; for a secret it must not show
	// the value. Nil: any text. It is not called for an empty value.
	Check func(value string) error
}

// Values are the checked settings and secrets of one request.
type Values struct {
	spec     *Spec
	settings map[string]string
	secrets  map[string]string
	query    string
}

// Read checks req against s and returns its values. Everything that is wrong with a setting, a secret or the query is
// found here, before anything is touched: errors have CodeBadSource or, for SQL, CodeReadOnly, and name the setting, the
// kind and what it accepts; they never show a secret's value.
func (s *Spec) Read(req Request) (*Values, error) {
	settings, err := s.check("setting", s.Settings, req.Settings)
	if err != nil {
		return nil, err
	}
	secrets, err := s.check("secret", s.Secrets, req.Secrets)
	if err != nil {
		return nil, err
	}
	switch {
	case s.Query == QueryNone && strings.TrimSpace(req.Query) != "":
		return nil, schemas.Errorf(schemas.CodeBadSource, "source %s takes no query", s.Kind)
	case s.Query == QuerySQL:
		if err := s.Dialect.ReadOnly(req.Query); err != nil {
			return nil, err
		}
	}
	return &Values{spec: s, settings: settings, secrets: secrets, query: req.Query}, nil
}

func (s *Spec) check(what string, known []Setting, given map[string]string) (map[string]string, error) {
	for _, name := range slices.Sorted(maps.Keys(given)) {
		if !slices.ContainsFunc(known, func(k Setting) bool { return k.Name == name }) {
			return nil, schemas.Errorf(schemas.CodeBadSource, "source %s has no %s %q", s.Kind, what, clip(name, 80)).WithHint(names(what, known))
		}
	}
	values := make(map[string]string, len(known))
	for _, k := range known {
		value := given[k.Name]
		if value == "" {
			value = k.Default
		}
		if value == "" && k.Required {
			return nil, schemas.Errorf(schemas.CodeBadSource, "source %s needs the %s %q", s.Kind, what, k.Name).WithHint(names(what, known))
		}
		if value != "" && k.Check != nil {
			if err := k.Check(value); err != nil {
				return nil, schemas.Errorf(schemas.CodeBadSource, "%s %q of source %s %s", what, k.Name, s.Kind, err.Error())
			}
		}
		values[k.Name] = value
	}
	return values, nil
}

// names is the hint that lists what a kind accepts.
func names(what string, known []Setting) string {
	if len(known) == 0 {
		return "it has no " + what + "s"
	}
	list := make([]string, len(known))
	for i, k := range known {
		list[i] = k.Name
		if k.Required {
			list[i] += " (required)"
		}
	}
	return "its " + what + "s are " + strings.Join(list, ", ")
}

// Query is the query as given.
func (v *Values) Query() string { return v.query }

// Text is the value of a setting, or its default; empty if it has neither. Asking for a setting that the Spec does not
// declare is a defect of the connector and panics.
func (v *Values) Text(name string) string { return v.get("setting", v.settings, name) }

// Secret is the value of a secret, empty if absent. It panics as Text does.
func (v *Values) Secret(name string) string { return v.get("secret", v.secrets, name) }

// Secrets are all secrets by name, for Redact.
func (v *Values) Secrets() map[string]string { return v.secrets }

func (v *Values) get(what string, from map[string]string, name string) string {
	value, ok := from[name]
	if !ok {
		panic(fmt.Sprintf("source: the spec of %s declares no %s %q", v.spec.Kind, what, name))
	}
	return value
}

// Int is a setting with the check IntBetween. Empty without default: 0.
func (v *Values) Int(name string) int64 { return parsed(v, name, parseInt) }

// Bool is a setting with the check IsBool. Empty without default: false.
func (v *Values) Bool(name string) bool { return parsed(v, name, strconv.ParseBool) }

// Duration is a setting with the check DurationBetween. Empty without default: 0.
func (v *Values) Duration(name string) time.Duration { return parsed(v, name, time.ParseDuration) }

func parsed[T any](v *Values, name string, parse func(string) (T, error)) T {
	var zero T
	text := v.Text(name)
	if text == "" {
		return zero
	}
	value, err := parse(text)
	if err != nil {
		panic(fmt.Sprintf("source: the spec of %s does not check the type of setting %q", v.spec.Kind, name))
	}
	return value
}

func parseInt(s string) (int64, error) { return strconv.ParseInt(s, 10, 64) }

// IntBetween checks for a decimal number from least to most.
func IntBetween(least, most int64) func(string) error {
	return func(s string) error {
		if n, err := parseInt(s); err != nil || n < least || n > most {
			return fmt.Errorf("must be a number from %d to %d", least, most)
		}
		return nil
	}
}

// IsPort checks for a TCP port.
func IsPort(s string) error { return IntBetween(1, 65535)(s) }

// IsBool checks for true or false, in the forms of strconv.ParseBool.
func IsBool(s string) error {
	if _, err := strconv.ParseBool(s); err != nil {
		return errors.New("must be true or false")
	}
	return nil
}

// DurationBetween checks for a Go duration, as in 30s, from least to most.
func DurationBetween(least, most time.Duration) func(string) error {
	return func(s string) error {
		if d, err := time.ParseDuration(s); err != nil || d < least || d > most {
			return fmt.Errorf("must be a duration from %s to %s, as in 30s", least, most)
		}
		return nil
	}
}

// OneOf checks for one of the words.
func OneOf(words ...string) func(string) error {
	return func(s string) error {
		if !slices.Contains(words, s) {
			return fmt.Errorf("must be one of %s", strings.Join(words, ", "))
		}
		return nil
	}
}

// clip shortens foreign text for a message to about most bytes and makes it valid UTF-8.
func clip(s string, most int) string {
	if len(s) > most {
		return strings.ToValidUTF8(s[:most], "�") + fmt.Sprintf("… (%d bytes)", len(s))
	}
	return strings.ToValidUTF8(s, "�")
}
