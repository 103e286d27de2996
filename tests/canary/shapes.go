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
	kind  string
	core  []byte // what is secret of it
	shape Shape
	size  int // of the text that it was read from
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
	return []credential{{kind: kind, core: text, shape: Random, size: len(text)}, {kind: kind, core: raw, shape: Bytes, size: len(text)}}
}

func readSessionToken(text []byte) []credential {
	token := sessionToken.Find(text)
	if _, err := schemas.SessionTokenHash(string(token)); err != nil {
		return nil
	}
	core := token[len(schemas.SessionTokenPrefix):]
	return []credential{{kind: "session token", core: core, shape: Random, size: len(token)}, {kind: "session token", core: decoded(core), shape: Bytes, size: len(token)}}
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
		{kind: "ticket", core: token, shape: Random}, {kind: "ticket", core: t.Token[:], shape: Bytes}, {kind: "ticket", core: []byte(inBase64(base64.RawURLEncoding, token, 10%3)), shape: Random},
		{kind: ProofKey, core: proof[:], shape: Bytes},
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
	list := []credential{{kind: "private key", core: block.Bytes, shape: Bytes, size: size}}
	number := secretNumber(block.Bytes)
	if number == nil {
		return list
	}
	list = append(list, credential{kind: "private key", core: number, shape: Bytes, size: size},
		credential{kind: "private key", core: []byte(decimal(number)), size: size})
	// The number as it stands in the lines of PEM: what is around it in them is in certificates too.
	at := bytes.Index(block.Bytes, number)
	line := base64.StdEncoding.EncodeToString(block.Bytes)
	for from, end := (at*8+5)/6, (at+len(number))*8/6; from < end; {
		to := min(end, (from/pemLine+1)*pemLine)
		list = append(list, credential{kind: "private key", core: []byte(line[from:to]), size: size})
		from = to
	}
	return list
}

// pemLine is how many characters PEM has in a line.
const pemLine = 64

// secretNumber is what is secret of a private key in PKCS#8 or SEC 1; nil for a kind that this platform has none of.
func secretNumber(der []byte) []byte {
	parsed, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		parsed, err = x509.ParseECPrivateKey(der)
	}
	if err != nil {
		return nil
	}
	switch key := parsed.(type) {
	case *ecdsa.PrivateKey:
		if number, err := key.Bytes(); err == nil {
			return number
		}
	case ed25519.PrivateKey:
		return key.Seed()
	}
	return nil
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
		s.add(c.kind, born, bytes.Clone(c.core), c.shape)
	}
}
