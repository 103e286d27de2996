package schemas

import (
	"encoding/base32"
	"math"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
)

// Address is where a dialled runner listens (SPEC C2).
type Address struct {
	Host string // an IP address without brackets, or an RFC 1123 name in lower case
	Port uint16 // 1–65535
}

// String is the canonical form, IPv6 in brackets; ParseAddress reads it back.
func (a Address) String() string { return net.JoinHostPort(a.Host, strconv.Itoa(int(a.Port))) }

// maxAddress is longer than any host and port.
const maxAddress = 253 + len(":65535")

// ParseAddress reads `host:port`: an IPv4 address, an IPv6 address in brackets or an RFC 1123 name, and a port. It returns an
// error of CodeInvalid that says what is wrong with this address, and that never repeats what may be a secret. The result is
// canonical: names in lower case, IPv6 in its short form, an IPv4 address in IPv6 clothes as IPv4.
func ParseAddress(s string) (Address, error) {
	switch {
	case s == "":
		return Address{}, badAddress("the address is empty")
	case holdsSecret(s):
		return Address{}, badAddress("the address holds what looks like a token or key, which must never stand in an address").
			WithHint("write host:port only; if a credential stood there, replace it")
	case len(s) > maxAddress:
		return Address{}, badAddress("the address has " + strconv.Itoa(len(s)) + " bytes: a host name has 253 at most")
	case strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r == 0x7f }):
		return Address{}, badAddress("the address has a space or a control character in it")
	case strings.ContainsFunc(s, func(r rune) bool { return r > 0x7f }):
		return Address{}, badAddress("the address is not plain ASCII: write an internationalised name in its xn-- form")
	case strings.Contains(s, "@"):
		return Address{}, badAddress("the address has a user (what stands before @): a runner is known by its certificate, write host:port only")
	case strings.Contains(s, "://"):
		return Address{}, badAddress("the address has a URL scheme: write host:port only")
	case strings.ContainsAny(s, "/?#"):
		return Address{}, badAddress("the address has a path, query or fragment: write host:port only")
	}
	host, port, err := splitAddress(s)
	if err != nil {
		return Address{}, err
	}
	n, err := parsePort(port)
	if err != nil {
		return Address{}, err
	}
	if host, err = parseHost(host, s[0] == '['); err != nil {
		return Address{}, err
	}
	return Address{Host: host, Port: n}, nil
}

func badAddress(text string) *Error {
	return (&Error{Code: CodeInvalid, Message: text}).WithHint("an address is host:port, such as 192.0.2.7:7443, [2001:db8::7]:7443 or edge.example.com:7443")
}

// splitAddress cuts at the colon before the port. Host comes without its brackets.
func splitAddress(s string) (host, port string, err error) {
	if s[0] == '[' {
		end := strings.IndexByte(s, ']')
		if end < 0 {
			return "", "", badAddress("the address opens a bracket and does not close it")
		}
		host, rest := s[1:end], s[end+1:]
		if rest == "" || rest == ":" {
			return "", "", badAddress("the address has no port")
		}
		if rest[0] != ':' {
			return "", "", badAddress("the address has something between the bracket and the port")
		}
		return host, rest[1:], nil
	}
	if strings.ContainsAny(s, "[]") {
		return "", "", badAddress("the address has a bracket in the wrong place: only an IPv6 address is put in brackets, as a whole")
	}
	if strings.Count(s, ":") > 1 {
		return "", "", badAddress("the address has more than one colon: put an IPv6 address in brackets, as in [2001:db8::7]:7443")
	}
	host, port, ok := strings.Cut(s, ":")
	if !ok || port == "" {
		return "", "", badAddress("the address has no port")
	}
	if host == "" {
		return "", "", badAddress("the address has no host")
	}
	return host, port, nil
}

func parsePort(s string) (uint16, error) {
	if strings.ContainsFunc(s, func(r rune) bool { return r < '0' || r > '9' }) {
		return 0, badAddress("the port is not a number")
	}
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, badAddress("the port is not in 1-65535")
	}
	if s[0] == '0' {
		return 0, badAddress("the port begins with a zero")
	}
	return uint16(n), nil
}

func parseHost(s string, bracketed bool) (string, error) {
	if bracketed {
		if strings.Contains(s, "%") {
			return "", badAddress("the address has an IPv6 zone, which means something on one host only")
		}
		ip, err := netip.ParseAddr(s)
		if err != nil || !ip.Is6() {
			return "", badAddress("what stands in brackets is not an IPv6 address")
		}
		return parseIP(ip)
	}
	if ip, err := netip.ParseAddr(s); err == nil {
		return parseIP(ip)
	}
	return parseHostName(strings.ToLower(s))
}

func parseIP(ip netip.Addr) (string, error) {
	ip = ip.Unmap()
	switch {
	case ip.IsUnspecified():
		return "", badAddress("the address is the unspecified one (" + ip.String() + "), which no host has")
	case ip.IsMulticast():
		return "", badAddress("the address is a multicast one (" + ip.String() + "), which no single host has")
	case ip == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return "", badAddress("the address is the broadcast one (" + ip.String() + "), which no single host has")
	}
	return ip.String(), nil
}

// numericLabel is a last label that resolvers take for a part of an IPv4 address.
var numericLabel = regexp.MustCompile(`^([0-9]+|0x[0-9a-f]*)$`)

func parseHostName(s string) (string, error) {
	if len(s) > 253 {
		return "", badAddress("the host name has " + strconv.Itoa(len(s)) + " bytes: 253 at most are allowed")
	}
	if strings.HasSuffix(s, ".") {
		return "", badAddress("the host name ends with a dot")
	}
	labels := strings.Split(s, ".")
	for _, l := range labels {
		switch {
		case l == "":
			return "", badAddress("the host name has an empty label")
		case len(l) > 63:
			return "", badAddress("a label of the host name has " + strconv.Itoa(len(l)) + " bytes: 63 at most are allowed")
		case l[0] == '-' || l[len(l)-1] == '-':
			return "", badAddress("a label of the host name begins or ends with -")
		case !isLabel(l):
			return "", badAddress("the host is neither an IP address nor a name of the letters a-z, digits and - (RFC 1123)")
		}
	}
	if numericLabel.MatchString(labels[len(labels)-1]) {
		return "", badAddress("the host looks like an IPv4 address and is none: four numbers of 0-255 without leading zeros")
	}
	return s, nil
}

// Shapes of credentials, beside our own, that people paste by mistake.
var (
	knownSecret = regexp.MustCompile(`(?i)(^|[^a-z0-9])(eyj[a-z0-9_-]{10,}|akia[a-z0-9]{16}|gh[opsu]_[a-z0-9]{10,}|glpat-[a-z0-9_-]{10,}|xox[abprs]-[a-z0-9-]{10,}|sk[-_][a-z0-9_-]{16,})`)
	ourSecret   = regexp.MustCompile(`(?i)(^|[^a-z0-9])(crt1|rsk1|rst1)([.]|[a-z0-9_-]{16})`)
	wordRuns    = regexp.MustCompile(`[A-Za-z0-9]{20,}`)
)

// holdsSecret reports whether some part of s looks like a token or a key.
func holdsSecret(s string) bool {
	if strings.Contains(s, "-----BEGIN") || ourSecret.MatchString(s) || knownSecret.MatchString(s) {
		return true
	}
	for _, run := range wordRuns.FindAllString(s, -1) {
		if isSeed(run) || isDense(run) {
			return true
		}
	}
	return false
}

// isSeed knows an nkeys seed, also in the lower case that a name may have been put into.
func isSeed(s string) bool {
	if len(s) < 56 || s[0]|0x20 != 's' {
		return false
	}
	_, err := base32.StdEncoding.WithPadding(base32.NoPadding).DecodeString(strings.ToUpper(s)[:56])
	return err == nil
}

// isDense tells a run of random letters and digits from a name. A name has words, so it repeats letters, and it has one case.
// The longest run that is let through is the id of a container or a volume in hex (17–31 digits).
func isDense(s string) bool {
	var lower, upper, digit bool
	count := make(map[rune]float64)
	for _, r := range s {
		lower = lower || r >= 'a' && r <= 'z'
		upper = upper || r >= 'A' && r <= 'Z'
		digit = digit || r >= '0' && r <= '9'
		count[r]++
	}
	if !digit || !lower && !upper {
		return false
	}
	var entropy float64
	for _, n := range count {
		p := n / float64(len(s))
		entropy -= p * math.Log2(p)
	}
	return lower && upper && entropy >= 3.5 || len(s) >= 32 && entropy >= 3
}
