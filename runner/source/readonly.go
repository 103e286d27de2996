package source

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/org-runink/runbus/schemas"
)

// readWords are the words a query may start with (SPEC F2).
var readWords = []string{"select", "with", "show", "describe", "desc", "explain"}

// writeWords start a statement that changes something.
var writeWords = []string{
	"insert", "update", "delete", "merge", "replace", "truncate", "create", "drop", "alter", "copy", "call", "do", "execute",
	"refresh", "grant", "revoke", "load", "vacuum", "reindex", "cluster", "declare",
}

// ReadOnlySQL returns nil if query is exactly one statement that starts with SELECT, WITH, SHOW, DESCRIBE, DESC or EXPLAIN
// (SPEC F2), else an error of CodeReadOnly that says why. Case, leading comments and parentheses, and one semicolon at the
// end don't matter. It holds for whatever database reads the query: what the dialects disagree about is refused. A connector
// that knows its database asks that Dialect.
//
// It is the first of two gates: the source's own read-only transaction is the second.
func ReadOnlySQL(query string) error { return AnySQL.ReadOnly(query) }

// ReadOnly is ReadOnlySQL by the rules of one dialect.
func (d Dialect) ReadOnly(query string) error {
	if strings.TrimSpace(query) == "" {
		return notReadOnly("the query is empty")
	}
	if !utf8.ValidString(query) || strings.ContainsRune(query, 0) {
		return notReadOnly("the query is not UTF-8 text, or has a NUL in it")
	}
	dialects := []Dialect{d}
	if d == AnySQL {
		dialects = []Dialect{PostgreSQL, SQLite, MySQL}
	}
	for _, dialect := range dialects {
		tokens, err := scan(dialect, query)
		if err == nil {
			err = readOnly(tokens)
		}
		if err == nil {
			continue
		}
		if d == AnySQL && dialect != PostgreSQL {
			return notReadOnly(fmt.Sprintf("by the rules of %s, %s", dialect, err))
		}
		return notReadOnly(err.Error())
	}
	return nil
}

func notReadOnly(reason string) error {
	return schemas.Errorf(schemas.CodeReadOnly, "the query is refused: %s", reason).
		WithHint("send one statement that starts with SELECT, WITH, SHOW, DESCRIBE, DESC or EXPLAIN")
}

// readOnly decides on the tokens of a query.
func readOnly(tokens []token) error {
	if end := slices.Index(tokens, token{tokenSign, ";"}); end >= 0 {
		if end+1 < len(tokens) {
			return errors.New("it has more than one statement")
		}
		tokens = tokens[:end]
	}
	for len(tokens) > 0 && tokens[0] == (token{tokenSign, "("}) {
		tokens = tokens[1:]
	}
	if len(tokens) == 0 {
		return errors.New("it has no statement")
	}
	first := tokens[0]
	if first.kind != tokenWord || !slices.Contains(readWords, first.text) {
		if first.kind == tokenQuoted {
			return errors.New("it does not start with a word")
		}
		return fmt.Errorf("it starts with %s", strings.ToUpper(clip(first.text, 40)))
	}
	switch first.text {
	case "explain", "describe", "desc":
		if err := explains(tokens[1:]); err != nil {
			return err
		}
	case "show":
		return nil
	}
	return writes(tokens)
}

// explains refuses EXPLAIN ANALYZE of a statement that writes: it runs it.
func explains(tokens []token) error {
	analyze := false
	for i, t := range tokens {
		switch {
		case t.kind != tokenWord:
		case t.text == "analyze" || t.text == "analyse":
			analyze = true
		case slices.Contains(readWords, t.text):
			return nil
		case slices.Contains(writeWords, t.text) && analyze && (i == 0 || tokens[i-1].text != "."):
			return fmt.Errorf("it explains %s by running it", strings.ToUpper(t.text))
		}
	}
	return nil
}

// writes refuses what writes inside a statement that starts as a read: INSERT, UPDATE, DELETE, MERGE or REPLACE where a
// statement can start in or after a WITH, and SELECT … INTO. The words stay allowed as names and functions.
func writes(tokens []token) error {
	for i := 1; i < len(tokens); i++ {
		t, before := tokens[i], tokens[i-1]
		if t.kind != tokenWord {
			continue
		}
		named := i+1 < len(tokens) && (tokens[i+1].kind == tokenWord || tokens[i+1].kind == tokenQuoted)
		switch t.text {
		case "into":
			if before.text != "." && before.text != "as" {
				return errors.New("it has an INTO")
			}
		case "insert", "update", "delete", "merge", "replace":
			if named && (before.text == "(" || before.text == ")") {
				return fmt.Errorf("it has %s as a part", article(t.text))
			}
		}
	}
	return nil
}

func article(word string) string {
	if strings.IndexByte("aeiou", word[0]) >= 0 {
		return "an " + strings.ToUpper(word)
	}
	return "a " + strings.ToUpper(word)
}
