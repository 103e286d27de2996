package tabular

import (
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"strconv"
	"strings"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
)

// Format is a kind of text with rows in it.
type Format string

// The formats.
const (
	CSV       Format = "csv"
	JSONLines Format = "jsonl"
	JSON      Format = "json"
)

const (
	// DefaultSampleRows is how many rows teach the types unless sampleRows says otherwise.
	DefaultSampleRows = 10_000
	maxSampleRows     = 1_000_000
	// sampleBytes bounds the memory that a sample takes.
	sampleBytes = 16 << 20
	// maxRecord bounds one record of text in bytes.
	maxRecord = 16 << 20
	// maxColumns bounds the columns of one result.
	maxColumns = 16384
)

// Settings are what every source with texts accepts beside its own settings.
var Settings = []source.Setting{
	{Name: "delimiter", Check: checkDelimiter},                       // csv: one ASCII character, or tab; default a comma
	{Name: "quote", Check: checkQuote},                               // csv: one ASCII character, or none; default "
	{Name: "header", Default: "true", Check: source.IsBool},          // csv: the first row has the names; else c1, c2, …
	{Name: "nullText"},                                               // csv: the unquoted field that is null; default the empty one
	{Name: "columns", Check: checkColumns},                           // a,b or ["a","b"]: only these, in this order
	{Name: "types", Check: checkTypes},                               // a:text,b:int64 or {"a":"text"}
	{Name: "allText", Default: "false", Check: source.IsBool},        // every column is text
	{Name: "sampleRows", Check: source.IntBetween(1, maxSampleRows)}, // rows that teach the types; default 10000
	{Name: "unknownFields", Check: source.OneOf("error", "notice")},  // fields that no sampled row had; default error
	{Name: "jsonPath", Check: pathErr},                               // json: where the rows are, as in data.items
}

// Options say how to read a text. The zero value of each field is its default, but for Header.
type Options struct {
	Delimiter     byte   // 0: a comma
	Quote         byte   // 0: `"`, unless NoQuote
	NoQuote       bool   // no character quotes
	Header        bool   // the first row of a CSV has the names
	NullText      string // see the package
	Columns       []string
	Types         map[string]Type
	AllText       bool
	SampleRows    int  // 0: DefaultSampleRows
	IgnoreUnknown bool // unknownFields=notice
	Rows          Path // where the rows of a JSON document are; empty: its root
	Union         bool // CSV texts may have different columns; what one lacks is null
	MaxRecord     int  // bytes of one record; 0: 16 MiB
}

// ReadOptions reads Settings. A setting of another format than f is an error.
func ReadOptions(v *source.Values, f Format) (Options, error) {
	for name, of := range map[string]Format{"delimiter": CSV, "quote": CSV, "nullText": CSV, "unknownFields": JSON, "jsonPath": JSON} {
		if v.Text(name) != "" && of != f && (of != JSON || f != JSONLines || name == "jsonPath") {
			return Options{}, schemas.Errorf(schemas.CodeBadSource, "setting %q is for the format %s, not for %s", name, of, f)
		}
	}
	o := Options{
		Header: v.Bool("header"), NullText: v.Text("nullText"), AllText: v.Bool("allText"),
		SampleRows: int(v.Int("sampleRows")), IgnoreUnknown: v.Text("unknownFields") == "notice",
	}
	var err error
	if o.Delimiter, err = parseDelimiter(v.Text("delimiter")); err != nil {
		return Options{}, err
	}
	if o.Quote, o.NoQuote, err = parseQuote(v.Text("quote")); err != nil {
		return Options{}, err
	}
	if o.Columns, err = parseColumns(v.Text("columns")); err != nil {
		return Options{}, err
	}
	if o.Types, err = parseTypes(v.Text("types")); err != nil {
		return Options{}, err
	}
	if o.Rows, err = ParsePath(v.Text("jsonPath")); err != nil {
		return Options{}, err
	}
	if f == CSV && !o.NoQuote && o.quote() == o.delimiter() {
		return Options{}, schemas.Errorf(schemas.CodeBadSource, "settings \"delimiter\" and \"quote\" are the same character")
	}
	return o, nil
}

func (o *Options) delimiter() byte {
	if o.Delimiter == 0 {
		return ','
	}
	return o.Delimiter
}

func (o *Options) quote() byte {
	if o.Quote == 0 {
		return '"'
	}
	return o.Quote
}

func (o *Options) sampleRows() int {
	if o.SampleRows <= 0 {
		return DefaultSampleRows
	}
	return o.SampleRows
}

func (o *Options) maxRecord() int {
	if o.MaxRecord <= 0 {
		return maxRecord
	}
	return o.MaxRecord
}

func checkDelimiter(s string) error { _, err := parseDelimiter(s); return err }

func parseDelimiter(s string) (byte, error) {
	switch {
	case s == "":
		return 0, nil
	case s == "tab" || s == `\t`:
		return '\t', nil
	case len(s) == 1 && isMark(s[0]):
		return s[0], nil
	}
	return 0, errors.New("must be one ASCII character that is no letter, digit or line break, or the word tab")
}

func checkQuote(s string) error { _, _, err := parseQuote(s); return err }

func parseQuote(s string) (quote byte, none bool, err error) {
	switch {
	case s == "":
		return 0, false, nil
	case s == "none":
		return 0, true, nil
	case len(s) == 1 && isMark(s[0]):
		return s[0], false, nil
	}
	return 0, false, errors.New("must be one ASCII character that is no letter, digit or line break, or the word none")
}

func isMark(c byte) bool {
	switch {
	case c == '\t':
		return true
	case c < ' ' || c >= 0x7f, c >= '0' && c <= '9', c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z':
		return false
	}
	return true
}

func checkColumns(s string) error { _, err := parseColumns(s); return err }

func parseColumns(s string) ([]string, error) {
	var names []string
	switch {
	case s == "":
		return nil, nil
	case strings.HasPrefix(s, "["):
		if err := json.Unmarshal([]byte(s), &names); err != nil {
			return nil, errors.New(`must be a list as in a,b or ["a","b"]`)
		}
	default:
		names = strings.Split(s, ",")
	}
	seen := map[string]bool{}
	for _, n := range names {
		if n == "" || seen[n] {
			return nil, errors.New("must have names that are not empty, each once")
		}
		seen[n] = true
	}
	if len(names) == 0 || len(names) > maxColumns {
		return nil, fmt.Errorf("must have 1 to %d names", maxColumns)
	}
	return names, nil
}

// Type is a type that a caller sets for a column.
type Type struct {
	kind             kind
	precision, scale int32 // kindDecimal
}

var typeNames = map[string]kind{
	"text": kindText, "json": kindJSON, "bool": kindBool, "int64": kindInt, "float64": kindFloat,
	"date": kindDate, "timestamp": kindTime, "timestamptz": kindTimeZ,
}

// ParseType reads the name of a type as in the package's comment.
func ParseType(s string) (Type, error) {
	s = strings.TrimSpace(s)
	if k, ok := typeNames[s]; ok {
		return Type{kind: k}, nil
	}
	if args, ok := strings.CutPrefix(s, "decimal("); ok {
		p, sc, two := strings.Cut(strings.TrimSuffix(args, ")"), ",")
		precision, err1 := strconv.Atoi(strings.TrimSpace(p))
		scale, err2 := strconv.Atoi(strings.TrimSpace(sc))
		if two && strings.HasSuffix(args, ")") && err1 == nil && err2 == nil && precision >= 1 && precision <= 38 && scale >= 0 && scale <= precision {
			return Type{kind: kindDecimal, precision: int32(precision), scale: int32(scale)}, nil //nolint:gosec // at most 38
		}
		return Type{}, fmt.Errorf("has the type %q: it must be decimal(p,s) with 1 ≤ p ≤ 38 and 0 ≤ s ≤ p", s)
	}
	known := []string{"decimal(p,s)"}
	for name := range typeNames {
		known = append(known, name)
	}
	sort.Strings(known)
	return Type{}, fmt.Errorf("has the type %q: the types are %s", s, strings.Join(known, ", "))
}

func checkTypes(s string) error { _, err := parseTypes(s); return err }

func parseTypes(s string) (map[string]Type, error) {
	if s == "" {
		return nil, nil
	}
	given := map[string]string{}
	if strings.HasPrefix(s, "{") {
		if err := json.Unmarshal([]byte(s), &given); err != nil {
			return nil, errors.New(`must be a list as in a:text,b:int64 or {"a":"text","b":"int64"}`)
		}
	} else {
		for _, pair := range splitOutside(s) {
			i := strings.LastIndexByte(pair, ':')
			if i <= 0 {
				return nil, errors.New(`must be a list as in a:text,b:int64 or {"a":"text","b":"int64"}`)
			}
			if _, twice := given[pair[:i]]; twice {
				return nil, fmt.Errorf("names the column %q twice", pair[:i])
			}
			given[pair[:i]] = pair[i+1:]
		}
	}
	types := make(map[string]Type, len(given))
	for name, text := range given {
		t, err := ParseType(text)
		if err != nil {
			return nil, err
		}
		types[name] = t
	}
	return types, nil
}

// splitOutside splits at commas that are not between parentheses.
func splitOutside(s string) []string {
	var parts []string
	depth, from := 0, 0
	for i := range len(s) {
		switch s[i] {
		case '(':
			depth++
		case ')':
			depth--
		case ',':
			if depth == 0 {
				parts = append(parts, s[from:i])
				from = i + 1
			}
		}
	}
	return append(parts, s[from:])
}
