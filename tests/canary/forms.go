package canary

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/url"
	"strconv"
	"strings"
)

// piece is how long a part of a long secret is that is found by itself: a text that was cut short shows a secret too.
const piece = 16

// Shape is what a secret looks like.
type Shape int

// The shapes.
const (
	Text   Shape = iota // a word of somebody's choice
	Random              // text of random characters: a piece of it tells as much as its length
	Bytes               // no text
)

// form is one way in which a secret may be written.
type form struct {
	name string
	text []byte
}

// forms are all of them, the plainest first.
func forms(secret []byte, shape Shape) []form {
	all := []form{{"as it is", secret}}
	add := func(name string, texts ...string) {
		for _, text := range texts {
			all = append(all, form{name, []byte(text)})
		}
	}
	add("hexadecimal", hex.EncodeToString(secret), strings.ToUpper(hex.EncodeToString(secret)), spaced("%02x", " ", secret), spaced("%02x", ":", secret))
	for shift := range 3 {
		add("base64", inBase64(base64.StdEncoding, secret, shift), inBase64(base64.URLEncoding, secret, shift))
	}
	add("numbers", spaced("%d", " ", secret), spaced("%d", ",", secret), spaced("0x%x", ", ", secret))
	add("percent-encoded", url.QueryEscape(string(secret)), url.PathEscape(string(secret)), url.UserPassword("", string(secret)).String()[1:], spaced("%%%02X", "", secret), spaced("%%%02x", "", secret))
	add("escaped", spaced(`\x%02x`, "", secret), spaced(`\u%04x`, "", secret))
	quoted := strconv.Quote(string(secret))
	add("quoted", quoted[1:len(quoted)-1])
	ascii := strconv.QuoteToASCII(string(secret))
	add("quoted", ascii[1:len(ascii)-1])
	if shape == Bytes {
		return all
	}
	var plain strings.Builder
	encode := json.NewEncoder(&plain)
	encode.SetEscapeHTML(false)
	if escaped, err := json.Marshal(string(secret)); err == nil && encode.Encode(string(secret)) == nil {
		add("JSON", string(escaped[1:len(escaped)-1]), strings.Trim(plain.String(), "\n")[1:plain.Len()-2])
	}
	if shape == Random {
		for at := 0; at+piece <= len(secret); at += piece {
			add("a piece of it", string(secret[at:at+piece]))
		}
	}
	return all
}

func spaced(format, between string, b []byte) string {
	parts := make([]string, len(b))
	for i, c := range b {
		parts[i] = fmt.Sprintf(format, c)
	}
	return strings.Join(parts, between)
}

// inBase64 is what base64 makes of a secret that stands, in what is encoded, so many bytes behind a multiple of three: without the
// characters that tell of its neighbours too.
func inBase64(encoding *base64.Encoding, secret []byte, shift int) string {
	text := encoding.WithPadding(base64.NoPadding).EncodeToString(append(make([]byte, shift), secret...))
	from := [3]int{0, 2, 3}[shift]
	to := (shift + len(secret)) * 8 / 6
	return text[from:to]
}
