package source

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"net/url"
	"regexp"
	"strconv"
	"strings"

	"github.com/org-runink/runbus/schemas"
)

const (
	// masked stands where a secret was.
	masked = "***"
	// wordSecret is the length in bytes below which a secret is masked only where it stands as a word of its own: masking
	// every `e` would destroy the text and tell the secret by the gaps.
	wordSecret = 4
	// pieceSecret is the length of a piece of a secret that is masked wherever it appears, so that a secret that a source
	// cut or wrapped over lines is found too.
	pieceSecret = 12
)

// Redact turns an error of a source into one that may cross the wire and be logged: a *schemas.Error with the source's own
// words (CodeSource, or the code that err has already), in which every secret is replaced by ***. It knows a secret as it is,
// with its URL, JSON, Go, base64 and hex encodings, inside base64 (as in basic authentication), the parts of a secret that is
// a URL or `user:password`, pieces of 12 or more bytes, and the password in any URL. Of err nothing is kept as a cause but the
// ends of a context, so that errors.Is(…, context.Canceled) still works. Nil gives nil.
func Redact(err error, secrets map[string]string) error {
	if err == nil {
		return nil
	}
	known := secretForms(secrets)
	safe := &schemas.Error{Code: schemas.CodeSource, Message: mask(err.Error(), known)}
	var coded *schemas.Error
	if errors.As(err, &coded) {
		safe.Code, safe.Message, safe.Hint = coded.Code, mask(coded.Message, known), mask(coded.Hint, known)
	}
	for _, end := range []error{context.Canceled, context.DeadlineExceeded} {
		if errors.Is(err, end) {
			safe.Cause = end
		}
	}
	return safe
}

// secretForms are the byte strings to look for, ASCII in lower case.
func secretForms(secrets map[string]string) [][]byte {
	seen := map[string]bool{}
	var forms [][]byte
	add := func(s string) {
		if s = lowerASCII(s); s != "" && !seen[s] {
			seen[s] = true
			forms = append(forms, []byte(s))
		}
	}
	for _, secret := range secrets {
		for _, s := range append(secretParts(secret), secret) {
			add(s)
			add(strings.ToValidUTF8(s, "�"))
			if len(s) < wordSecret {
				continue // its encodings are too common
			}
			add(strings.TrimSpace(s))
			add(url.QueryEscape(s))
			add(url.PathEscape(s))
			add(strings.TrimPrefix(url.UserPassword("", s).String(), ":"))
			quoted := strconv.Quote(s)
			add(quoted[1 : len(quoted)-1])
			if j, err := json.Marshal(s); err == nil {
				add(string(j[1 : len(j)-1]))
			}
			add(hex.EncodeToString([]byte(s)))
			add(base64.RawStdEncoding.EncodeToString([]byte(s)))
			add(base64.RawURLEncoding.EncodeToString([]byte(s)))
		}
	}
	return forms
}

// secretParts are the parts of a compound secret that are secret themselves: the password of a URL, its query values, what
// follows the colon of user:password.
func secretParts(secret string) []string {
	var parts []string
	if u, err := url.Parse(secret); err == nil && u.Host != "" {
		if password, ok := u.User.Password(); ok {
			parts = append(parts, password)
		}
		for _, values := range u.Query() {
			for _, v := range values {
				if len(v) >= 8 { // shorter ones are options, as in sslmode=require
					parts = append(parts, v)
				}
			}
		}
		return parts
	}
	if user, password, ok := strings.Cut(secret, ":"); ok && user != "" && !strings.ContainsAny(secret, " \n") {
		parts = append(parts, password)
	}
	return parts
}

var (
	urlPassword = regexp.MustCompile(`://[^/\s:@"']*:([^\s"']+)@`)
	base64Run   = regexp.MustCompile(`[A-Za-z0-9+/_-]{8,}`)
)

// mask replaces every known form in text.
func mask(text string, forms [][]byte) string {
	text = strings.ToValidUTF8(text, "�")
	lower := []byte(lowerASCII(text))
	hidden := make([]bool, len(text))
	hide := func(from, to int) {
		for i := from; i < to; i++ {
			hidden[i] = true
		}
	}
	for _, form := range forms {
		markForm(lower, form, hide)
	}
	for _, m := range urlPassword.FindAllStringSubmatchIndex(text, -1) {
		hide(m[2], m[3])
	}
	for _, m := range base64Run.FindAllStringIndex(text, -1) {
		if decodesToSecret(text[m[0]:m[1]], forms) {
			hide(m[0], m[1])
		}
	}
	var b strings.Builder
	for i := 0; i < len(text); {
		if !hidden[i] {
			b.WriteByte(text[i])
			i++
			continue
		}
		b.WriteString(masked)
		for i < len(text) && hidden[i] {
			i++
		}
	}
	return strings.ToValidUTF8(b.String(), "�")
}

// markForm hides each place of form in text, and of its pieces if it is long.
func markForm(text, form []byte, hide func(from, to int)) {
	word := len(form) < wordSecret
	for at := 0; ; {
		i := bytes.Index(text[at:], form)
		if i < 0 {
			break
		}
		from, to := at+i, at+i+len(form)
		if !word || !isWordByte(text, from-1) && !isWordByte(text, to) {
			hide(from, to)
		}
		at = from + 1
	}
	if len(form) <= pieceSecret || len(text) < pieceSecret {
		return
	}
	pieces := make(map[string]bool, len(form))
	for i := 0; i+pieceSecret <= len(form); i++ {
		pieces[string(form[i:i+pieceSecret])] = true
	}
	for i := 0; i+pieceSecret <= len(text); i++ {
		if pieces[string(text[i:i+pieceSecret])] {
			hide(i, i+pieceSecret)
		}
	}
}

func isWordByte(text []byte, i int) bool {
	if i < 0 || i >= len(text) {
		return false
	}
	c := text[i]
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c >= 0x80
}

// decodesToSecret reports whether run is base64 of something with a secret in it.
func decodesToSecret(run string, forms [][]byte) bool {
	run = strings.NewReplacer("-", "+", "_", "/").Replace(run)
	for skip := 0; skip < 4 && skip < len(run); skip++ { // text before it may have run into it
		part := run[skip:]
		decoded, err := base64.RawStdEncoding.DecodeString(part[:len(part)/4*4])
		if rest, e := base64.RawStdEncoding.DecodeString(part); e == nil {
			decoded, err = rest, nil
		}
		if err != nil {
			continue
		}
		lower := []byte(lowerASCII(string(decoded)))
		for _, form := range forms {
			if len(form) >= wordSecret && bytes.Contains(lower, form) {
				return true
			}
		}
	}
	return false
}

// lowerASCII keeps the length in bytes.
func lowerASCII(s string) string {
	b := []byte(s)
	for i, c := range b {
		if c >= 'A' && c <= 'Z' {
			b[i] = c + 'a' - 'A'
		}
	}
	return string(b)
}
