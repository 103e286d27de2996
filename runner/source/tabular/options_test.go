package tabular

import (
	"math/big"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/org-runink/runbus/runner/source"
)

func TestPath(t *testing.T) {
	good := map[string]Path{
		"":                 nil,
		"$":                nil,
		"a":                {{Name: "a", Index: -1}},
		"$.a.b":            {{Name: "a", Index: -1}, {Name: "b", Index: -1}},
		"a[0].b":           {{Name: "a", Index: -1}, {Index: 0, Only: true}, {Name: "b", Index: -1}},
		"a.0":              {{Name: "a", Index: -1}, {Name: "0", Index: 0}},
		"a.00":             {{Name: "a", Index: -1}, {Name: "00", Index: -1}},
		`["x.y"].z`:        {{Name: "x.y", Index: -1}, {Name: "z", Index: -1}},
		"[12]":             {{Index: 12, Only: true}},
		"a b.ü":            {{Name: "a b", Index: -1}, {Name: "ü", Index: -1}},
		`a["\u0062"]`:      {{Name: "a", Index: -1}, {Name: "b", Index: -1}},
		`$["]"]`:           {{Name: "]", Index: -1}},
		".a":               {{Name: "a", Index: -1}},
		"$[2147483647].aa": {{Index: 2147483647, Only: true}, {Name: "aa", Index: -1}},
	}
	for s, want := range good {
		got, err := ParsePath(s)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %v %v, want %v", s, got, err, want)
		}
	}
	for _, s := range []string{"a..b", "a.", "a[", "a[x]", "a[-1]", "a[01]", `a["x]`, `a["x"`, "a]b", "$a", "a[0]b", "a\nb", "a[99999999999]", strings.Repeat("a.", 40) + "a", "\xff"} {
		if p, err := ParsePath(s); err == nil {
			t.Errorf("%q gives %v", s, p)
		}
	}
}

func FuzzPath(f *testing.F) {
	for _, s := range []string{"a.b[0]", `$["x"]`, "a.0", "$", `["\ud800"]`, `["a\"b"]`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := ParsePath(s)
		if err != nil {
			return
		}
		again, err := ParsePath(p.String())
		if err != nil || !reflect.DeepEqual(p, again) {
			t.Fatalf("%q → %#v → %q → %#v (%v)", s, p, p.String(), again, err)
		}
	})
}

func TestReadOptions(t *testing.T) {
	spec := source.Spec{Kind: "x", Settings: Settings}
	read := func(f Format, kv ...string) (Options, error) {
		settings := map[string]string{}
		for i := 0; i < len(kv); i += 2 {
			settings[kv[i]] = kv[i+1]
		}
		v, err := spec.Read(source.Request{Settings: settings})
		if err != nil {
			return Options{}, err
		}
		return ReadOptions(v, f)
	}
	o, err := read(CSV, "delimiter", "tab", "quote", "none", "header", "false", "nullText", `\N`, "columns", `["a,b","c"]`, "types", "a,b:text", "sampleRows", "5")
	if err == nil {
		t.Errorf("types with a comma in a name: %+v", o)
	}
	o, err = read(CSV, "delimiter", "tab", "quote", "none", "header", "false", "nullText", `\N`, "columns", `["a,b","c"]`, "types", "c:decimal(10,2),d:x:int64", "sampleRows", "5")
	want := Options{Delimiter: '\t', NoQuote: true, NullText: `\N`, Columns: []string{"a,b", "c"}, Types: map[string]Type{"c": {kindDecimal, 10, 2}, "d:x": {kind: kindInt}}, SampleRows: 5}
	if err != nil || !reflect.DeepEqual(o, want) {
		t.Errorf("got %+v %v, want %+v", o, err, want)
	}
	if o, err = read(JSON, "jsonPath", "data.items", "types", `{"a":"date"}`, "unknownFields", "notice"); err != nil || o.Rows.String() != "$.data.items" || !o.IgnoreUnknown || o.Types["a"].kind != kindDate {
		t.Errorf("%+v %v", o, err)
	}
	for _, bad := range [][]string{
		{"csv", "delimiter", "ab"}, {"csv", "delimiter", "a"}, {"csv", "delimiter", "\n"}, {"csv", "quote", "é"}, {"csv", "delimiter", `"`},
		{"csv", "columns", "a,a"}, {"csv", "columns", "a,"}, {"csv", "columns", "[1]"}, {"csv", "types", "a"}, {"csv", "types", "a:int"}, {"csv", "types", "a:decimal(39,0)"},
		{"csv", "types", "a:text,a:int64"}, {"csv", "sampleRows", "0"}, {"csv", "jsonPath", "a"}, {"jsonl", "jsonPath", "a"}, {"json", "delimiter", ";"}, {"json", "nullText", "x"}, {"csv", "unknownFields", "notice"}, {"json", "jsonPath", "a..b"}, {"csv", "nope", "1"},
	} {
		if _, err := read(Format(bad[0]), bad[1:]...); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
	if _, err := read(JSONLines, "unknownFields", "notice"); err != nil {
		t.Error(err)
	}
}

// A literal that is taken as float64 gives its digits back.
func TestFloatKeepsDigits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := rapid.StringMatching(`-?[1-9][0-9]{0,25}\.[0-9]{1,25}(e-?[0-9]{1,3})?`).Draw(t, "literal")
		l := classifyNumber([]byte(s))
		if l.kind != kindFloat {
			return
		}
		n, _ := scanNumber([]byte(s))
		v, err := strconv.ParseFloat(s, 64)
		if err != nil {
			t.Fatalf("%s: %v", s, err)
		}
		exact, _, err := big.ParseFloat(s, 10, 400, big.ToNearestEven)
		if err != nil {
			t.Fatal(err)
		}
		have := strconv.FormatFloat(v, 'e', n.significant-1, 64)
		if want := exact.Text('e', n.significant-1); have != want {
			t.Fatalf("%s would become %s, not %s", s, have, want)
		}
	})
}

// Dates and timestamps agree with the standard library.
func TestStampAgreesWithTime(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		at := time.Unix(rapid.Int64Range(-62135596800, 253402300799).Draw(t, "s"), rapid.Int64Range(0, 999_999_999).Draw(t, "ns")).UTC()
		zone := time.FixedZone("", rapid.IntRange(-23*60, 23*60).Draw(t, "zone")*60)
		local := at.In(zone)
		if y := local.Year(); y < 1 || y > 9999 {
			return
		}
		text := local.Format("2006-01-02T15:04:05.999999999Z07:00")
		s, ok := scanStamp([]byte(text))
		if !ok || s.unixMicro() != at.UnixMicro() {
			t.Fatalf("%s: %+v %v, want %d", text, s, ok, at.UnixMicro())
		}
		day, ok := scanStamp([]byte(at.Format("2006-01-02")))
		if !ok || !day.date || day.days*86400 != at.Truncate(24*time.Hour).Unix() {
			t.Fatalf("%s: %+v", at.Format("2006-01-02"), day)
		}
	})
}

func FuzzStamp(f *testing.F) {
	f.Add("2024-02-29T10:00:00.5+01:00")
	f.Add("2024-02-29 24:00:00Z")
	f.Fuzz(func(t *testing.T, s string) {
		st, ok := scanStamp([]byte(s))
		if !ok || !st.zone || len(s) < 20 {
			return
		}
		at, err := time.Parse(time.RFC3339Nano, strings.Replace(s, " ", "T", 1))
		if err == nil && at.UnixMicro() != st.unixMicro() {
			t.Fatalf("%q is %d, package time says %d", s, st.unixMicro(), at.UnixMicro())
		}
	})
}
