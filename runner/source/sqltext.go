package source

import (
	"errors"
	"fmt"
	"strings"
)

// Dialect says by whose rules a query is taken apart.
type Dialect int

// The dialects. AnySQL is for a source whose rules are not known, and the zero value: what is allowed must be one read-only
// statement by the rules of every dialect below.
const (
	AnySQL Dialect = iota
	PostgreSQL
	SQLite
	MySQL // and MariaDB
)

// String is the dialect's name.
func (d Dialect) String() string {
	return [...]string{"any SQL", "PostgreSQL", "SQLite", "MySQL"}[d]
}

// token is a piece of a query. Comments and white space are none.
type token struct {
	kind tokenKind
	text string // words in lower case; strings and quoted names are left empty
}

type tokenKind int

const (
	tokenWord   tokenKind = iota // keyword or plain name
	tokenQuoted                  // string, quoted name, number, parameter
	tokenSign                    // one character
)

// scanner takes a query apart by the rules of one dialect. Where servers disagree, or a setting of the server decides, it
// gives an error instead of a guess.
type scanner struct {
	dialect Dialect
	rest    string
	tokens  []token
}

func scan(d Dialect, query string) ([]token, error) {
	s := &scanner{dialect: d, rest: query}
	for s.rest != "" {
		if err := s.next(); err != nil {
			return nil, err
		}
	}
	return s.tokens, nil
}

func (s *scanner) add(kind tokenKind, text string) { s.tokens = append(s.tokens, token{kind, text}) }

// next takes one token, comment or run of white space from rest.
func (s *scanner) next() error {
	c := s.rest[0]
	switch {
	case isSpace(c):
		s.rest = s.rest[1:]
		return nil
	case strings.HasPrefix(s.rest, "--") && (s.dialect != MySQL || len(s.rest) == 2 || s.rest[2] <= ' ' || s.rest[2] == 0x7f):
		return s.lineComment()
	case c == '#' && s.dialect == MySQL:
		return s.lineComment()
	case strings.HasPrefix(s.rest, "/*"):
		return s.blockComment()
	case c == '\'':
		return s.quoted('\'', s.dialect == MySQL)
	case c == '"':
		return s.quoted('"', s.dialect == MySQL)
	case c == '`' && s.dialect != PostgreSQL:
		return s.quoted('`', false)
	case c == '[' && s.dialect == SQLite:
		end := strings.IndexByte(s.rest, ']')
		if end < 0 {
			return errors.New("a [ is not closed")
		}
		return s.take(end + 1)
	case (c == 'e' || c == 'E') && s.dialect == PostgreSQL && strings.HasPrefix(s.rest[1:], "'"):
		s.rest = s.rest[1:]
		return s.escapeString()
	case isWordStart(c):
		n := 1
		for n < len(s.rest) && (isWordStart(s.rest[n]) || isDigit(s.rest[n]) || s.rest[n] == '$') {
			n++
		}
		s.add(tokenWord, lowerASCII(s.rest[:n]))
		s.rest = s.rest[n:]
		return nil
	case isDigit(c):
		return s.number()
	case c == '$' && s.dialect == PostgreSQL:
		return s.dollar()
	case s.dialect == SQLite && strings.IndexByte("$@#:", c) >= 0:
		return s.take(sqliteVariable(s.rest))
	}
	s.add(tokenSign, string(rune(c)))
	s.rest = s.rest[1:]
	return nil
}

func (s *scanner) take(n int) error {
	s.add(tokenQuoted, "")
	s.rest = s.rest[n:]
	return nil
}

// lineComment ends at a line feed. PostgreSQL ends it at a carriage return too, others don't.
func (s *scanner) lineComment() error {
	line, rest, _ := strings.Cut(s.rest, "\n")
	if strings.Contains(strings.TrimSuffix(line, "\r"), "\r") {
		return errors.New("a comment has a carriage return in it: databases disagree about where it ends")
	}
	s.rest = rest
	return nil
}

// blockComment is nested in PostgreSQL only. In MySQL, one that starts with ! or M! is not a comment.
func (s *scanner) blockComment() error {
	if s.dialect == MySQL && (strings.HasPrefix(s.rest, "/*!") || strings.HasPrefix(s.rest, "/*M!")) {
		return errors.New("a comment that starts with /*! is run by MySQL")
	}
	depth := 1
	for i := 2; i+1 < len(s.rest); i++ {
		switch s.rest[i : i+2] {
		case "*/":
			if depth--; depth == 0 {
				s.rest = s.rest[i+2:]
				return nil
			}
			i++
		case "/*":
			if s.dialect == PostgreSQL {
				depth++
				i++
			}
		}
	}
	return errors.New("a comment is not closed")
}

// quoted takes a string or name in which a doubled quote stands for one. A backslash before the quote ends the string in
// standard SQL and doesn't in MySQL, and with a setting of the server each has it the other way. It is harmless in SQLite, and
// in a quoted name, which has no backslashes anywhere but in MySQL.
func (s *scanner) quoted(quote byte, backslash bool) error {
	for i := 1; i < len(s.rest); i++ {
		if s.rest[i] != quote {
			continue
		}
		if (quote == '\'' && s.dialect != SQLite || backslash) && oddBackslashes(s.rest[1:i]) {
			return errors.New("a string has a backslash before its quote: databases disagree about where it ends")
		}
		if i+1 < len(s.rest) && s.rest[i+1] == quote {
			i++
			continue
		}
		return s.take(i + 1)
	}
	return fmt.Errorf("a %c is not closed", quote)
}

// oddBackslashes reports whether the text ends in an odd number of backslashes.
func oddBackslashes(text string) bool {
	return (len(text)-len(strings.TrimRight(text, `\`)))%2 == 1
}

// escapeString takes the rest of PostgreSQL's E'…' from its quote on: a backslash escapes whatever follows.
func (s *scanner) escapeString() error {
	for i := 1; i < len(s.rest); i++ {
		switch s.rest[i] {
		case '\\':
			i++
		case '\'':
			if i+1 < len(s.rest) && s.rest[i+1] == '\'' {
				i++
				continue
			}
			return s.take(i + 1)
		}
	}
	return errors.New("an E' is not closed")
}

// number takes a number with what letters it runs into. What may come then and be taken for the start of something else is
// refused, for servers differ by version.
func (s *scanner) number() error {
	n := 1
	for n < len(s.rest) && (isDigit(s.rest[n]) || isWordStart(s.rest[n]) || s.rest[n] == '.') {
		n++
	}
	letters := isWordStart(s.rest[n-1])
	if n < len(s.rest) && (s.rest[n] == '$' || letters && strings.IndexByte("'\"`", s.rest[n]) >= 0) {
		return errors.New("a number is not followed by a space")
	}
	return s.take(n)
}

// dollar takes PostgreSQL's $tag$…$tag$ or a parameter. (After a name the $ belongs to it, after a number it is refused.)
func (s *scanner) dollar() error {
	n := 1
	for n < len(s.rest) && (isWordStart(s.rest[n]) || n > 1 && isDigit(s.rest[n])) {
		n++
	}
	if n == len(s.rest) || s.rest[n] != '$' { // $1, or a lone $
		s.add(tokenSign, "$")
		s.rest = s.rest[1:]
		return nil
	}
	tag := s.rest[:n+1]
	end := strings.Index(s.rest[n+1:], tag)
	if end < 0 {
		return fmt.Errorf("a %s is not closed", clip(tag, 40))
	}
	return s.take(n + 1 + end + len(tag))
}

// sqliteVariable is the length of a parameter of SQLite: it may have one suffix in parentheses, in which nothing has a meaning.
func sqliteVariable(text string) int {
	named := 0
	for i := 1; i < len(text); i++ {
		switch c := text[i]; {
		case isWordStart(c) || isDigit(c) || c == '$':
			named++
		case c == '(' && named > 0:
			for i++; i < len(text) && !isSpace(text[i]) && text[i] != ')'; i++ {
			}
			if i < len(text) && text[i] == ')' {
				i++
			}
			return i
		case c == ':' && i+1 < len(text) && text[i+1] == ':':
			i++
		default:
			return i
		}
	}
	return len(text)
}

func isSpace(c byte) bool { return c == ' ' || c >= '\t' && c <= '\r' }
func isDigit(c byte) bool { return c >= '0' && c <= '9' }
func isWordStart(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_' || c >= 0x80
}
