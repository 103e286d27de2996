package tabular

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Path is a place in a JSON document. Grammar:
//
//	path  = ["$"] [ step *( step ) ]       the empty path and "$" are the root
//	step  = "." name | "[" digits "]" | "[" JSON string "]"
//
// The first step may be a name without its dot: `data.items`, `items[0].rows`, `$["a.b"].c`. A name is one or more characters
// other than . [ ] and control characters. A step of digits after a dot, as in `data.0`, takes a field of that name from
// an object and an element from an array. At most 32 steps.
type Path []Step

// Step is one step of a Path: the field Name of an object, or the element Index of an array.
type Step struct {
	Name  string
	Index int64 // -1: not an element
	Only  bool  // Index in brackets: never a field
}

const maxSteps = 32

// ParsePath reads a path.
func ParsePath(s string) (Path, error) {
	var p Path
	rest := strings.TrimPrefix(s, "$")
	bare := rest == s // the first name needs no dot
	for len(rest) > 0 {
		if len(p) == maxSteps {
			return nil, fmt.Errorf("has more than %d steps", maxSteps)
		}
		switch {
		case rest[0] == '[':
			step, n, err := bracket(rest)
			if err != nil {
				return nil, err
			}
			p, rest = append(p, step), rest[n:]
		case rest[0] == '.' || bare:
			rest = strings.TrimPrefix(rest, ".")
			n := strings.IndexAny(rest, ".[]")
			if n < 0 {
				n = len(rest)
			}
			name := rest[:n]
			if name == "" || !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return r < ' ' || r == 0x7f }) {
				return nil, errors.New("is not a path as in data.items, items[0].rows or $[\"a.b\"]")
			}
			step := Step{Name: name, Index: -1}
			if i, err := strconv.ParseUint(name, 10, 31); err == nil && (name == "0" || name[0] != '0') {
				step.Index = int64(i)
			}
			p, rest = append(p, step), rest[n:]
		default:
			return nil, errors.New("is not a path as in data.items, items[0].rows or $[\"a.b\"]")
		}
		bare = false
	}
	return p, nil
}

// bracket reads [0] or ["name"] at the start of s and its length.
func bracket(s string) (Step, int, error) {
	bad := errors.New(`has a bracket that is neither [0] nor ["name"]`)
	if len(s) > 1 && s[1] == '"' {
		d := json.NewDecoder(strings.NewReader(s[1:]))
		var name string
		if err := d.Decode(&name); err != nil || !utf8.ValidString(s) {
			return Step{}, 0, bad
		}
		end := 1 + int(d.InputOffset())
		if end >= len(s) || s[end] != ']' {
			return Step{}, 0, bad
		}
		return Step{Name: name, Index: -1}, end + 1, nil
	}
	end := strings.IndexByte(s, ']')
	if end < 0 {
		return Step{}, 0, bad
	}
	i, err := strconv.ParseUint(s[1:end], 10, 31)
	if err != nil || len(s[1:end]) > 1 && s[1] == '0' {
		return Step{}, 0, bad
	}
	return Step{Index: int64(i), Only: true}, end + 1, nil
}

func pathErr(s string) error { _, err := ParsePath(s); return err }

// String is the path in its grammar: ParsePath(p.String()) is p.
func (p Path) String() string {
	var b strings.Builder
	b.WriteByte('$')
	for _, s := range p {
		plain := s.Name != "" && !strings.ContainsAny(s.Name, ".[]") && !strings.ContainsFunc(s.Name, func(r rune) bool { return r < ' ' || r == 0x7f })
		switch {
		case s.Only:
			fmt.Fprintf(&b, "[%d]", s.Index)
		case plain && (s.Index >= 0 || !isIndex(s.Name)):
			b.WriteString("." + s.Name)
		default:
			quoted, _ := json.Marshal(s.Name) // a string always marshals
			b.WriteString("[" + string(quoted) + "]")
		}
	}
	return b.String()
}

func isIndex(name string) bool {
	_, err := strconv.ParseUint(name, 10, 31)
	return err == nil && (name == "0" || name[0] != '0')
}

// field reports whether the step takes the field of that name.
func (s Step) field(name string) bool { return !s.Only && s.Name == name }

// element reports whether the step takes the i-th element.
func (s Step) element(i int64) bool { return s.Index == i && s.Index >= 0 }
