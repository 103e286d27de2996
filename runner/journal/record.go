// Package journal is a runner's own record of every fetch: one line of JSON each time a fetch begins or ends, appended to files of the
// runner's host and chained by hashes, so that a line that was changed, removed, put in or cut off is found (Verify).
//
// A line is a JSON object whose last field is `hash`, the SHA-256 in hex of the line before that field; `prev` is the hash of the line
// before, 64 zeros in the first. Lines count from 1 in `seq`, over all files. A file is named by its first line's number. The file
// `head` names the last line that is known to be on the disk, so that a cut end is found too. Whoever can write the folder can make
// a whole journal anew: against that, keep its head elsewhere (Verify takes it; the runner tells it in each hello).
package journal

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// The events.
const (
	EventStart     = "start"     // a fetch is about to begin: nothing was touched yet
	EventEnd       = "end"       // it has ended
	EventRecovered = "recovered" // a line that a crash had left unfinished was taken out
)

// Record is one line.
type Record struct {
	Seq   uint64    `json:"seq"`
	Prev  string    `json:"prev"`
	At    time.Time `json:"at"` // of the runner's host, UTC
	Event string    `json:"event"`

	// What, when and by whom: in start and end.
	Dispatch string  `json:"dispatch,omitempty"`
	Tenant   string  `json:"tenant,omitempty"`
	Runner   string  `json:"runner,omitempty"`
	Caller   *Caller `json:"caller,omitempty"` // nil when the fetch came without credentials: then only the dispatch names it
	Kind     string  `json:"kind,omitempty"`
	Target   string  `json:"target,omitempty"`
	Query    *Query  `json:"query,omitempty"`
	Policy   string  `json:"policy,omitempty"` // digest of the policy in force

	// How it ended: in end.
	Outcome    string   `json:"outcome,omitempty"` // `completed`, or the code of the error
	Reason     string   `json:"reason,omitempty"`  // of a refusal by the policy
	Rules      []string `json:"rules,omitempty"`   // that allowed or refused something
	Dialled    []string `json:"dialled,omitempty"` // addresses with port, at most 20
	Rows       int64    `json:"rows,omitempty"`
	Bytes      int64    `json:"bytes,omitempty"`    // Arrow bytes before compression
	BytesOut   int64    `json:"bytesOut,omitempty"` // that left for the control plane
	DurationMS int64    `json:"durationMs,omitempty"`

	// What was taken out: in recovered.
	DroppedBytes  int64  `json:"droppedBytes,omitempty"`
	DroppedSHA256 string `json:"droppedSha256,omitempty"`
}

// Caller is on whose behalf a fetch runs, as it came sealed with the credentials.
type Caller struct {
	Tenant string `json:"tenant"`
	Person string `json:"person"`
	Role   string `json:"role"`
}

// Query is a statement without its text, unless the policy wants that too.
type Query struct {
	Word   string `json:"word"` // the first, in upper case; empty if it has over 16 letters
	SHA256 string `json:"sha256"`
	Text   string `json:"text,omitempty"`
}

// DescribeQuery is nil for no query.
func DescribeQuery(text string, full bool) *Query {
	if text == "" {
		return nil
	}
	sum := sha256.Sum256([]byte(text))
	q := &Query{SHA256: hex.EncodeToString(sum[:])}
	end := strings.IndexFunc(text, func(r rune) bool { return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') })
	if end < 0 {
		end = len(text)
	}
	if end <= maxWord { // what is longer is no statement's first word, and may be anything
		q.Word = strings.ToUpper(text[:end])
	}
	if full {
		q.Text = clip(text, 64<<10)
	}
	return q
}

// Target is what of a source's settings tells where it is, without anything that may be a secret: of a URL no user, query or
// fragment.
func Target(settings map[string]string) string {
	switch {
	case settings["url"] != "":
		u, _, _ := strings.Cut(settings["url"], "#")
		u, _, _ = strings.Cut(u, "?")
		if scheme, rest, ok := strings.Cut(u, "://"); ok {
			host, path, slash := strings.Cut(rest, "/")
			host = host[strings.LastIndexByte(host, '@')+1:]
			if u = scheme + "://" + host; slash {
				u += "/" + path
			}
		}
		return clip(u, 1024)
	case settings["path"] != "":
		return clip(settings["path"], 1024)
	case settings["host"] != "":
		target := settings["host"]
		if port := settings["port"]; port != "" {
			target += ":" + port
		}
		if database := settings["database"]; database != "" {
			target += "/" + database
		}
		return clip(target, 1024)
	}
	return ""
}

func clip(s string, most int) string {
	if len(s) > most {
		s = s[:most]
	}
	return strings.ToValidUTF8(s, "")
}

const (
	hashBytes = 2 * sha256.Size
	// maxLine bounds a line in bytes, its line feed included.
	maxLine = 1 << 20
	maxWord = 16
)

var zeroHash = strings.Repeat("0", hashBytes)

// tail is what stands behind a line's hashed part.
func tail(hash string) string { return `,"hash":"` + hash + `"}` }

// appendLine appends the record's line with its line feed; prev is the hash of the one before.
func appendLine(b []byte, r *Record, prev []byte) ([]byte, error) {
	start := len(b)
	b, err := appendBody(b, r, prev)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(b[start:])
	b = hex.AppendEncode(append(b, `,"hash":"`...), sum[:])
	b = append(b, "\"}\n"...)
	if len(b)-start > maxLine {
		return nil, fmt.Errorf("a record of %d bytes is more than a line may have", len(b)-start)
	}
	return b, nil
}

// hashOf is the hash of the last of some lines that appendLine made.
func hashOf(lines []byte) []byte {
	end := len(lines) - len("\"}\n")
	return lines[end-hashBytes : end]
}

// decode reads a line without its line feed and checks it against its own hash.
func decode(line []byte) (r Record, hash string, err error) {
	cut := len(line) - len(tail(zeroHash))
	if cut <= 0 {
		return Record{}, "", errors.New("it is too short for a record")
	}
	sum := sha256.Sum256(line[:cut])
	hash = hex.EncodeToString(sum[:])
	end := string(line[cut:])
	switch {
	case !strings.HasPrefix(end, `,"hash":"`) || !strings.HasSuffix(end, `"}`):
		return Record{}, "", errors.New("it does not end in a hash")
	case end != tail(hash):
		return Record{}, "", errors.New("it was changed: its hash is another")
	case !utf8.Valid(line):
		return Record{}, "", errors.New("it is not text")
	}
	if err := json.Unmarshal(append(line[:cut:cut], '}'), &r); err != nil {
		return Record{}, "", fmt.Errorf("it is no record: %w", err)
	}
	return r, hash, nil
}

// Anchor names one line of a journal.
type Anchor struct {
	Seq  uint64 `json:"seq"`
	Hash string `json:"hash"`
}

// String is `seq:hash`.
func (a Anchor) String() string { return fmt.Sprintf("%d:%s", a.Seq, a.Hash) }

// ParseAnchor reads what String wrote.
func ParseAnchor(s string) (Anchor, error) {
	seq, hash, ok := strings.Cut(s, ":")
	n, err := strconv.ParseUint(seq, 10, 64)
	if err != nil || !ok || !isHash(hash) || strconv.FormatUint(n, 10) != seq {
		return Anchor{}, fmt.Errorf("%q is not NUMBER:SHA256, as a journal's head is written", clip(s, 100))
	}
	return Anchor{Seq: n, Hash: hash}, nil
}

func isHash(s string) bool {
	return len(s) == hashBytes && strings.Trim(s, "0123456789abcdef") == ""
}
