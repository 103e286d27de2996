package schemas

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"
)

// TicketPrefix begins every ticket.
const TicketPrefix = "crt1."

// maxTicket is longer than any ticket that Encode makes.
const maxTicket = 1024

// Ticket enrols one dialled runner once (SPEC C3). It says nothing of where anybody listens. It is a secret as a whole: the
// printed, logged and JSON forms show the runner only, and Encode alone gives the token away.
type Ticket struct {
	Token     [32]byte
	RunnerID  string
	Name      string
	ExpiresAt time.Time // in whole seconds, UTC
	CASHA256  [32]byte  // of the runner CA's certificate, DER
}

// ticketBody is the JSON in a ticket.
type ticketBody struct {
	Token    string `json:"token"` // base64url
	RunnerID string `json:"runnerId"`
	Name     string `json:"name"`
	Expires  string `json:"expires"` // RFC 3339
	CA       string `json:"ca"`      // hex
}

// Encode is the ticket as it is handed over: `crt1.` and base64url.
func (t Ticket) Encode() string {
	body, err := json.Marshal(ticketBody{
		Token: base64.RawURLEncoding.EncodeToString(t.Token[:]), RunnerID: t.RunnerID, Name: t.Name,
		Expires: t.ExpiresAt.UTC().Format(time.RFC3339), CA: hex.EncodeToString(t.CASHA256[:]),
	})
	if err != nil {
		panic(err) // strings alone
	}
	return TicketPrefix + base64.RawURLEncoding.EncodeToString(body)
}

// ParseTicket reads what Encode wrote and nothing else. It does not look at the expiry. An error is of CodeInvalid, says what is
// wrong and never repeats a part of s.
func ParseTicket(s string) (Ticket, error) {
	bad := func(what string) (Ticket, error) {
		return Ticket{}, Errorf(CodeInvalid, "this is not a ticket: %s", what).
			WithHint("copy the ticket whole, as `runink runner create` or `runink runner token` printed it")
	}
	if len(s) > maxTicket {
		return bad("it is too long")
	}
	rest, ok := strings.CutPrefix(s, TicketPrefix)
	if !ok {
		return bad("it does not begin with " + TicketPrefix)
	}
	if rest == "" {
		return bad("it is truncated")
	}
	body, err := base64.RawURLEncoding.Strict().DecodeString(rest)
	if err != nil {
		if strings.ContainsFunc(rest, func(r rune) bool { return !isBase64URL(r) }) {
			return bad("it has a character that is not of base64url")
		}
		return bad("it is truncated")
	}
	var b ticketBody
	d := json.NewDecoder(bytes.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(&b); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
			return bad("it is truncated")
		}
		return bad("its content is damaged, or of a version that this program does not know")
	}
	var t Ticket
	token, err := base64.RawURLEncoding.Strict().DecodeString(b.Token)
	if err != nil || copy(t.Token[:], token) != len(t.Token) || len(token) != len(t.Token) {
		return bad("its token has not 32 bytes")
	}
	ca, err := hex.DecodeString(b.CA)
	if err != nil || copy(t.CASHA256[:], ca) != len(t.CASHA256) || len(ca) != len(t.CASHA256) {
		return bad("the SHA-256 of the CA in it has not 32 bytes")
	}
	if t.RunnerID = b.RunnerID; !IsDialledID(b.RunnerID) {
		return bad("the runner id in it is none of a dialled runner")
	}
	if t.Name = b.Name; ValidName("name", b.Name) != nil {
		return bad("the runner's name in it is no DNS label")
	}
	if t.ExpiresAt, err = time.Parse(time.RFC3339, b.Expires); err != nil {
		return bad("its expiry is no time")
	}
	t.ExpiresAt = t.ExpiresAt.UTC()
	if t.Encode() != s {
		return bad("its content is damaged")
	}
	return t, nil
}

func isBase64URL(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '_'
}

// String shows the runner and when the ticket expires, nothing of the token.
func (t Ticket) String() string {
	return fmt.Sprintf("ticket of runner %s (%s) until %s", t.RunnerID, t.Name, t.ExpiresAt.UTC().Format(time.RFC3339))
}

// GoString is String, for %#v.
func (t Ticket) GoString() string { return t.String() }

// Format prints String whatever the verb is, so that no verb shows the token.
func (t Ticket) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, t.String()) }

// LogValue is String, for slog.
func (t Ticket) LogValue() slog.Value { return slog.StringValue(t.String()) }

// MarshalText is String, for JSON and the like.
func (t Ticket) MarshalText() ([]byte, error) { return []byte(t.String()), nil }
