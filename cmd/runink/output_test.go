package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os/exec"
	"strings"
	"testing"

	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/schemas"
)

// hostile moves a cursor, changes a title, and turns the direction of writing.
const hostile = "a\x1b[2J\x07\u009b31m\x7f\u202eb\u2066c\r\nd\te"

func TestTablesDoNotSteerTheTerminal(t *testing.T) {
	var out bytes.Buffer
	rows := newTableRows(&out, 1)
	name, err := json.Marshal(hostile)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(
		rows.columns([]column{{Name: hostile}}), rows.row(json.RawMessage(`{`+string(name)+`:`+string(name)+`}`)), rows.row(json.RawMessage(`{}`)), rows.end(),
	); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimRight(out.String(), "\n"), "\n")
	if len(lines) != 3 || lines[2] != "… and 1 more rows" {
		t.Errorf("%q", lines)
	}
	for _, l := range lines {
		if strings.ContainsFunc(l, process.Steers) {
			t.Errorf("%q steers a terminal", l)
		}
	}
}

func TestErrorsDoNotSteerTheTerminal(t *testing.T) {
	for _, err := range []error{
		errors.New(hostile), schemas.Errorf(schemas.CodeSource, "%s", hostile).WithHint(hostile), schemas.Wrap(schemas.CodeFailed, errors.New(hostile), hostile),
	} {
		var plain, asJSON bytes.Buffer
		if status := report(&plain, err, false); status == 0 {
			t.Error("status 0")
		}
		report(&asJSON, err, true)
		for _, text := range []string{plain.String(), asJSON.String()} {
			if strings.ContainsFunc(strings.NewReplacer("\n", "", "\t", "").Replace(text), process.Steers) {
				t.Errorf("%q steers a terminal", text)
			}
		}
		var e struct {
			Error map[string]string `json:"error"`
		}
		if err := json.Unmarshal(asJSON.Bytes(), &e); err != nil || len(e.Error) != 3 || e.Error["message"] != hostile {
			t.Errorf("%s: %v", asJSON.String(), err)
		}
	}
}

// What is escaped in JSON keeps its value.
func TestJSONKeepsValues(t *testing.T) {
	var out bytes.Buffer
	if err := printJSON(&out, map[string]string{"v": hostile}); err != nil {
		t.Fatal(err)
	}
	var got map[string]string
	if err := json.Unmarshal(out.Bytes(), &got); err != nil || got["v"] != hostile {
		t.Errorf("%q %v", got, err)
	}
	if strings.ContainsFunc(strings.ReplaceAll(out.String(), "\n", ""), process.Steers) {
		t.Errorf("%q steers a terminal", out.String())
	}
}

func TestQuoteIsAWordOfTheShell(t *testing.T) {
	for _, word := range []string{"", "plain/path", "two words", "it's", `$HOME "x" \ ;`, "'", "~", "ä"} {
		out, err := exec.Command("sh", "-c", "printf %s "+quote(word)).Output()
		if err != nil || string(out) != word {
			t.Errorf("%q came as %q (%v)", word, out, err)
		}
	}
}

func TestStatusOfCodes(t *testing.T) {
	for code, want := range map[schemas.Code]int{
		schemas.CodeRunnerBusy: 3, schemas.CodeNoRunner: 3, schemas.CodeForbidden: 3, schemas.CodeUnauthorized: 3, schemas.CodeOutcomeUnknown: 4,
		schemas.CodeFailed: 1, schemas.CodeCancelled: 1, schemas.CodeDeadline: 1, schemas.CodeRunnerLost: 1, schemas.CodeUnavailable: 1,
	} {
		if got := statusOf(schemas.Errorf(code, "x")); got != want {
			t.Errorf("%s: %d, want %d", code, got, want)
		}
	}
}
