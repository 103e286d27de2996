package canary

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"regexp"
	"strings"

	"github.com/nats-io/nkeys"

	"github.com/org-runink/runbus/schemas"
)

// credential is a secret that was recognised by its form.
type credential struct {
	kind string
	core []byte // what is secret of it
	raw  bool
	size int // of the text that it was read from
}

// shapes are the forms of this platform's credentials. read takes those that text begins with.
var shapes = []struct {
	prefix string
	read   func(text []byte) []credential
}{
	{schemas.ServiceTokenPrefix, readServiceToken},
	{schemas.SessionTokenPrefix, readSessionToken},
	{schemas.TicketPrefix, readTicket},
	{"rlt1.", readLinkToken},
	{"-----BEGIN ", readKey},
}

var (
	serviceToken = regexp.MustCompile(`\Arsk1\.[a-z0-9-]{1,63}\.SU[A-Z2-7]{56}`)
	sessionToken = regexp.MustCompile(`\Arst1\.[A-Za-z0-9_-]{43}`)
	ticket       = regexp.MustCompile(`\Acrt1\.[A-Za-z0-9_-]{16,}`)
	linkToken    = regexp.MustCompile(`\Arlt1\.[A-Za-z0-9_-]{40,}\.[A-Za-z0-9_-]{40,}`)
	seed         = regexp.MustCompile(`\bS[UAXNOC][A-Z2-7]{56}\b`)
)

func readServiceToken(text []byte) []credential {
	token := serviceToken.Find(text)
	if _, err := schemas.ParseServiceToken(string(token)); err != nil {
		return nil
	}
	c := readSeed("runner token", token[bytes.LastIndexByte(token, '.')+1:])
	for i := range c {
		c[i].size = len(token)
	}
	return c
}

// readSeed takes an nkeys seed: its text, and the bytes in it.
func readSeed(kind string, text []byte) []credential {
	_, raw, err := nkeys.DecodeSeed(text)
	if err != nil {
		return nil
	}
	return []credential{{kind: kind, core: text, size: len(text)}, {kind: kind, core: raw, raw: true, size: len(text)}}
}

func readSessionToken(text []byte) []credential {
	token := sessionToken.Find(text)
	if _, err := schemas.SessionTokenHash(string(token)); err != nil {
		return nil
	}
	core := token[len(schemas.SessionTokenPrefix):]
	return []credential{{kind: "session token", core: core, size: len(token)}, {kind: "session token", core: decoded(core), raw: true, size: len(token)}}
}

func readTicket(text []byte) []credential {
	found := ticket.Find(text)
	t, err := schemas.ParseTicket(string(found))
	if err != nil {
		return nil
	}
	proof := schemas.EnrolmentKey(t.Token, t.RunnerID)
	token := []byte(encoded(t.Token[:]))
	// In a ticket's text the token stands behind ten bytes, {"token":", in base64.
	list := []credential{
		{kind: "ticket", core: token}, {kind: "ticket", core: t.Token[:], raw: true}, {kind: "ticket", core: []byte(inBase64(base64.RawURLEncoding, token, 10%3))},
		{kind: ProofKey, core: proof[:], raw: true},
	}
	for i := range list {
		list[i].size = len(found)
	}
	return list
}

// ProofKey is the kind of what proves a ticket's token: the bucket of proofs has it.
const ProofKey = "enrolment proof"

func readLinkToken(text []byte) []credential {
	token := linkToken.Find(text)
	if token == nil {
		return nil
	}
	return []credential{{kind: "link token", core: token[bytes.LastIndexByte(token, '.')+1:], size: len(token)}}
}

// readKey takes a private key in PEM: its lines, and the numbers in it.
func readKey(text []byte) []credential {
	block, rest := pem.Decode(text)
	if block == nil || !strings.HasSuffix(block.Type, "PRIVATE KEY") || !bytes.HasPrefix(text, []byte("-----BEGIN "+block.Type)) {
		return nil
	}
	size := len(text) - len(rest)
	var list []credential
	lines := strings.Split(strings.TrimSpace(string(text[:size])), "\n")
	for _, line := range lines[1 : len(lines)-1] {
		if line = strings.TrimSpace(line); len(line) == 64 { // the last line may be of the public key alone
			list = append(list, credential{kind: "private key", core: []byte(line), size: size})
		}
	}
	list = append(list, credential{kind: "private key", core: block.Bytes, raw: true, size: size})
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		parsed, err = x509.ParseECPrivateKey(block.Bytes)
	}
	if err != nil {
		return list
	}
	switch key := parsed.(type) {
	case *ecdsa.PrivateKey:
		scalar, err := key.Bytes()
		if err == nil {
			list = append(list, credential{kind: "private key", core: scalar, raw: true, size: size},
				credential{kind: "private key", core: []byte(decimal(scalar)), size: size})
		}
	case ed25519.PrivateKey:
		list = append(list, credential{kind: "private key", core: key.Seed(), raw: true, size: size})
	}
	return list
}

// Learn makes known every credential that stands in text: tokens, tickets, seeds, keys. born is where that is.
func (s *Set) Learn(born string, text []byte) {
	var all []credential
	for _, shape := range shapes {
		for at := 0; ; {
			i := bytes.Index(text[at:], []byte(shape.prefix))
			if i < 0 {
				break
			}
			at += i
			all = append(all, shape.read(text[at:])...)
			at += len(shape.prefix)
		}
	}
	for _, where := range seed.FindAllIndex(text, -1) {
		all = append(all, readSeed("seed", text[where[0]:where[1]])...)
	}
	if len(all) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range all {
		s.add(c.kind, born, bytes.Clone(c.core), c.raw)
	}
}
