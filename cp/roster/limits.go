package roster

import (
	"encoding/json"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/org-runink/runbus/schemas"
)

// The limits of a tenant (SPEC R1). A write over one is refused and names it; nothing is truncated.
const (
	MaxRunners  = 100       // dialled runners, revoked ones too until they are removed
	MaxTokens   = 100       // live ones
	MaxLabels   = 8         // of a runner
	MaxDocument = 512 << 10 // bytes of the tenant's document
)

const (
	// keepEnded is how long a used, revoked or expired token is kept, so that its bearer can be told.
	keepEnded = 24 * time.Hour
	// keepCertificate is how long after a token's expiry the certificate that it gave is kept.
	keepCertificate = time.Hour

	maxZone       = 63
	maxLabelKey   = 63
	maxLabelValue = 128

	// What a runner and a live token may still grow by: a change by a person leaves that much free, so that an enrolment or a
	// renewal is never refused for the size of the document.
	leafBytes  = 384
	claimBytes = 2 << 10
)

// prune drops what is not needed any more.
func (d *document) prune(now time.Time) {
	d.Tokens = slices.DeleteFunc(d.Tokens, func(t Token) bool {
		return !t.Live(now) && now.Sub(t.ended()) > keepEnded
	})
	for i := range d.Tokens {
		if t := &d.Tokens[i]; now.Sub(t.ExpiresAt) > keepCertificate {
			t.Certificate = nil
		}
	}
}

// limits returns nil if d is within the limits, else an error of CodeLimit that names the one it is over.
func (d *document) limits(now time.Time) error {
	if len(d.Runners) > MaxRunners {
		return schemas.Errorf(schemas.CodeLimit, "a tenant has at most %d dialled runners", MaxRunners).
			WithHint("revoke one that is not needed and remove it (`runink runner remove`); revoked ones count until then")
	}
	live, grow := 0, 0
	for _, t := range d.Tokens {
		if t.Live(now) {
			live++
			grow += claimBytes
		}
	}
	if live > MaxTokens {
		return schemas.Errorf(schemas.CodeLimit, "a tenant has at most %d live enrolment tokens", MaxTokens).
			WithHint("revoke one that is not needed (`runink runner token revoke`), or wait: they expire by themselves")
	}
	for _, r := range d.Runners {
		if len(r.Labels) > MaxLabels {
			return schemas.Errorf(schemas.CodeLimit, "a runner has at most %d labels, and these are %d", MaxLabels, len(r.Labels))
		}
		if r.State == Revoked {
			continue
		}
		for _, leaf := range []*Leaf{r.Current, r.Next} {
			if leaf == nil {
				grow += leafBytes
			}
		}
	}
	if d.atMost()+grow <= MaxDocument {
		return nil
	}
	body, err := json.Marshal(d)
	if err != nil {
		return schemas.Wrap(schemas.CodeInvalid, err, "the runner can't be stored")
	}
	if len(body)+grow > MaxDocument {
		return schemas.Errorf(schemas.CodeLimit, "the runner registry of a tenant has at most 512 KiB, and this would make it larger").
			WithHint("remove revoked runners, or use fewer and shorter labels")
	}
	return nil
}

// atMost is how long the document's JSON is at most: most are far below the limit, and to know that must not cost an encoding.
func (d *document) atMost() int {
	const (
		runnerFrame, tokenFrame, leafFrame, labelFrame, debtFrame = 512, 512, 320, 6, 64 // names of fields, times, ids, hashes
		escaped                                                   = 6                    // bytes for one, as in \u003c
	)
	size := 64
	for _, r := range d.Runners {
		size += runnerFrame + len(r.Tenant) + len(r.Name) + len(r.Address) + len(r.Zone) + escaped*len(r.CreatedBy)
		for key, value := range r.Labels {
			size += labelFrame + len(key) + escaped*len(value)
		}
		for _, leaf := range []*Leaf{r.Current, r.Next} {
			if leaf != nil {
				size += leafFrame + 2*len(leaf.PublicKey)
			}
		}
	}
	for _, t := range d.Tokens {
		size += tokenFrame + 2*len(t.Certificate)
	}
	for _, o := range d.Owed {
		size += debtFrame + 2*len(o.Event)
	}
	return size
}

// validZone returns nil for up to 63 of letters, digits, - _ and dots; empty: none.
func validZone(zone string) error {
	if len(zone) > maxZone || strings.ContainsFunc(zone, func(c rune) bool { return !isWord(c) }) {
		return schemas.Errorf(schemas.CodeInvalid, "the zone is not up to %d of A-Z a-z 0-9 - _ .", maxZone)
	}
	if looksSecret(zone) {
		return schemas.Errorf(schemas.CodeInvalid, "the zone looks like a token: those belong into no registry")
	}
	return nil
}

// validLabels checks grammar and number.
func validLabels(labels map[string]string) error {
	if len(labels) > MaxLabels {
		return schemas.Errorf(schemas.CodeLimit, "a runner has at most %d labels, and these are %d", MaxLabels, len(labels))
	}
	for key, value := range labels {
		if key == "" || len(key) > maxLabelKey || strings.ContainsFunc(key, func(c rune) bool { return !isWord(c) && c != '/' }) {
			return schemas.Errorf(schemas.CodeInvalid, "a label's name is not 1-%d of A-Z a-z 0-9 - _ . /", maxLabelKey)
		}
		if looksSecret(key) || looksSecret(value) {
			return schemas.Errorf(schemas.CodeInvalid, "a label looks like a token: those belong into no registry")
		}
		if len(value) > maxLabelValue || !utf8.ValidString(value) || strings.ContainsFunc(value, func(c rune) bool { return c < ' ' || c == 0x7f }) {
			return schemas.Errorf(schemas.CodeInvalid, "the value of label %q is not text of up to %d bytes in one line", key, maxLabelValue)
		}
	}
	return nil
}

func isWord(c rune) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.'
}

// looksSecret reports whether s begins like a credential of this platform.
func looksSecret(s string) bool { return schemas.IsCredential(s) }
