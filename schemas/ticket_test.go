package schemas_test

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/org-runink/runbus/schemas"
)

func sampleTicket() schemas.Ticket {
	t := schemas.Ticket{RunnerID: schemas.NewRunnerID(), Name: "edge", ExpiresAt: time.Unix(1_900_000_000, 0).UTC()}
	copy(t.Token[:], "token-token-token-token-token-to")
	copy(t.CASHA256[:], "ca-sha-256-ca-sha-256-ca-sha-256")
	return t
}

func TestTicketRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := schemas.Ticket{
			RunnerID: schemas.NewRunnerID(), Name: rapid.StringMatching(`[a-z]([a-z0-9-]{0,40}[a-z0-9])?`).Draw(t, "name"),
			ExpiresAt: time.Unix(rapid.Int64Range(0, 1<<33).Draw(t, "expires"), 0).UTC(),
		}
		copy(want.Token[:], rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(t, "token"))
		copy(want.CASHA256[:], rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(t, "ca"))
		if schemas.ValidName("name", want.Name) != nil {
			return
		}
		got, err := schemas.ParseTicket(want.Encode())
		if err != nil || got != want {
			t.Fatalf("%v, %v", got, err)
		}
	})
}

func TestBadTickets(t *testing.T) {
	good := sampleTicket()
	text := good.Encode()
	body := func(change func(map[string]any)) string {
		raw, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(text, schemas.TicketPrefix))
		if err != nil {
			t.Fatal(err)
		}
		m := map[string]any{}
		if err := json.Unmarshal(raw, &m); err != nil {
			t.Fatal(err)
		}
		change(m)
		if raw, err = json.Marshal(m); err != nil {
			t.Fatal(err)
		}
		return schemas.TicketPrefix + base64.RawURLEncoding.EncodeToString(raw)
	}
	set := func(name string, value any) string { return body(func(m map[string]any) { m[name] = value }) }
	for in, want := range map[string]string{
		"":                          "does not begin with",
		"crt2." + text[5:]:          "does not begin with",
		"CRT1." + text[5:]:          "does not begin with",
		" " + text:                  "does not begin with",
		"crt1.":                     "truncated",
		text[:len(text)-1]:          "truncated",
		text[:len(text)-2]:          "truncated",
		text[:len(text)/2]:          "truncated",
		text[:7]:                    "truncated",
		text + "=":                  "not of base64url",
		text + "\n":                 "damaged",
		text[:20] + "+":             "not of base64url",
		text + text:                 "not of base64url",
		text + "AAAA":               "damaged",
		"crt1.bm90IGpzb24":          "damaged",
		set("extra", 1):             "damaged",
		set("token", 7):             "damaged",
		set("token", "AAAA"):        "32 bytes",
		set("token", good.Token[:]): "32 bytes",
		set("ca", "abcd"):           "32 bytes",
		set("ca", strings.ToUpper(hex.EncodeToString(good.CASHA256[:]))): "damaged",
		set("runnerId", "edge"):                         "runner id",
		set("runnerId", strings.ToUpper(good.RunnerID)): "runner id",
		set("name", "Not a label"):                      "DNS label",
		set("name", "console"):                          "DNS label",
		set("expires", "tomorrow"):                      "no time",
		set("expires", "2030-01-01T00:00:00+02:00"):     "damaged",
		"crt1." + strings.Repeat("A", 4096):             "too long",
	} {
		_, err := schemas.ParseTicket(in)
		if err == nil {
			t.Errorf("a ticket that should be refused with %q was taken", want)
			continue
		}
		if !strings.Contains(err.Error(), want) || schemas.CodeOf(err) != schemas.CodeInvalid {
			t.Errorf("%q does not say %q", err, want)
		}
		if len(in) > 40 && strings.Contains(err.Error(), in[8:24]) {
			t.Error("the error repeats the ticket")
		}
	}
}

func TestATicketIsNeverPrinted(t *testing.T) {
	ticket := sampleTicket()
	var out bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%08b"} {
		_, _ = fmt.Fprintf(&out, verb+" "+verb+" "+verb+"\n", ticket, &ticket, []schemas.Ticket{ticket})
	}
	slog.New(slog.NewTextHandler(&out, nil)).Info("a", "ticket", ticket, "pointer", &ticket, "in", struct{ T schemas.Ticket }{ticket})
	slog.New(slog.NewJSONHandler(&out, nil)).Info("a", "ticket", ticket, "pointer", &ticket, "in", struct{ T schemas.Ticket }{ticket})
	asJSON, err := json.Marshal(map[string]any{"a": ticket, "b": []*schemas.Ticket{&ticket}})
	if err != nil {
		t.Fatal(err)
	}
	out.Write(asJSON)
	_, _ = fmt.Fprint(&out, errors.Join(fmt.Errorf("bad: %v", ticket)))
	for _, secret := range []string{
		"token-token", hex.EncodeToString(ticket.Token[:8]), strings.ToUpper(hex.EncodeToString(ticket.Token[:8])), "116 111 107 101",
		base64.RawURLEncoding.EncodeToString(ticket.Token[:6]), ticket.Encode()[6:20], "01110100",
	} {
		if strings.Contains(out.String(), secret) {
			t.Errorf("a printed form shows the token:\n%s", out.String())
		}
	}
	if !strings.Contains(out.String(), ticket.RunnerID) {
		t.Error("a printed form does not name the runner")
	}
}

func TestSPIFFEIDs(t *testing.T) {
	id := schemas.NewRunnerID()
	if id == schemas.NewRunnerID() || !schemas.IsDialledID(id) || schemas.ValidRunnerID(id) != nil {
		t.Fatalf("%q is no fresh id of a dialled runner", id)
	}
	parse := func(s string) *url.URL {
		u, err := url.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	if u := schemas.RunnerURI(id); u.String() != "spiffe://core.runink/runner/"+id {
		t.Error(u)
	}
	if got, err := schemas.RunnerOfURI(parse("spiffe://core.runink/runner/" + id)); err != nil || got != id {
		t.Error(got, err)
	}
	if !schemas.IsControlPlaneURI(parse("spiffe://core.runink/control-plane")) {
		t.Error("the control plane's id is not known")
	}
	for _, bad := range []string{
		"spiffe://core.runink/runner/", "spiffe://core.runink/runner/edge", "spiffe://core.runink/runner/" + id + "/", "spiffe://core.runink//runner/" + id,
		"spiffe://core.runink/runner/" + strings.ToUpper(id), "spiffe://core.runink:443/runner/" + id, "spiffe://u@core.runink/runner/" + id,
		"spiffe://core.runink/runner/" + id + "?a=1", "spiffe://core.runink/runner/" + id + "#a", "spiffe://other/runner/" + id, "https://core.runink/runner/" + id,
		"spiffe://core.runink/control-plane", "spiffe:/runner/" + id, "spiffe://core.runink/Runner/" + id, "SPIFFE://CORE.RUNINK/runner/" + id,
		"spiffe://core.runink/runner/" + id + "?", "spiffe://core.runink/runner/%72" + id[1:], "spiffe://core.runink/x/../runner/" + id,
	} {
		if got, err := schemas.RunnerOfURI(parse(bad)); err == nil {
			t.Errorf("%s was taken as %s", bad, got)
		}
		if bad != "spiffe://core.runink/control-plane" && schemas.IsControlPlaneURI(parse(bad)) {
			t.Errorf("%s was taken as the control plane", bad)
		}
	}
	for _, no := range []string{"", "r-", id + "a", id[:len(id)-1], "x" + id[1:], "r-" + strings.Repeat("1", 26), "r-" + strings.Repeat("A", 26), "runner-0123456789ab"} {
		if schemas.IsDialledID(no) {
			t.Errorf("%q was taken as a dialled runner's id", no)
		}
	}
}

func FuzzParseTicket(f *testing.F) {
	text := sampleTicket().Encode()
	f.Add(text)
	f.Add(text[:len(text)-3])
	f.Add("crt1.")
	f.Add("crt1.e30")
	f.Fuzz(func(t *testing.T, s string) {
		got, err := schemas.ParseTicket(s)
		if err == nil && got.Encode() != s {
			t.Fatal("a ticket that Encode would not write was taken")
		}
	})
}

func FuzzRunnerOfURI(f *testing.F) {
	f.Add("spiffe://core.runink/runner/" + schemas.NewRunnerID())
	f.Add("spiffe://core.runink/control-plane")
	f.Fuzz(func(t *testing.T, s string) {
		u, err := url.Parse(s)
		if err != nil {
			return
		}
		if id, err := schemas.RunnerOfURI(u); err == nil && (!schemas.IsDialledID(id) || u.String() != schemas.RunnerURI(id).String()) {
			t.Fatalf("%q was taken as %q", s, id)
		}
	})
}
