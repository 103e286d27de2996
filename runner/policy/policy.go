// Package policy decides what a runner may reach, by a file on the runner's own host that the control plane can see a summary of
// and cannot change (SPEC E12). A policy is checked before a connector starts (kind and path), on every address that is dialled, after
// its name was resolved, on every file that is opened, with symbolic links resolved, and on every byte that leaves. Cloud-metadata
// addresses are refused by runner/source before a policy is asked: no rule can allow them.
package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/org-runink/runbus/runner/source"
)

// Policy is a parsed file in normal form: lists are sorted and without doubles, hosts in lower case, sizes in bytes. It is not
// changed after Parse. A nil Policy allows everything.
type Policy struct {
	// Default decides what no rule does: `deny`, unless the file says `allow`.
	Default string `json:"default"`
	// Allow: the first rule that matches is the one whose budget counts. Deny wins over Allow.
	Allow []Rule `json:"allow"`
	Deny  []Rule `json:"deny"`
	// Budget is that of all fetches, whatever rule allows them.
	Budget  Budget  `json:"budget"`
	Journal Journal `json:"journal"`

	digest string // of the rest, made by Parse
}

// Rule matches what meets each of its criteria; a criterion is met by any entry of its list, and an empty one by everything. A rule
// is about the network (hosts, cidrs, ports), about files (paths), or, with kinds alone, about both.
type Rule struct {
	Name  string         `json:"name,omitempty"`
	Kinds []string       `json:"kinds,omitempty"`
	Hosts []string       `json:"hosts,omitempty"` // `name`, or `*.suffix`: every name below suffix
	CIDRs []netip.Prefix `json:"cidrs,omitempty"` // of the address that is dialled
	Ports []Ports        `json:"ports,omitempty"`
	Paths []string       `json:"paths,omitempty"` // a file, or a folder with all that is below
	// Budget of an allow rule is what its fetches may send.
	Budget *Budget `json:"budget,omitempty"`

	index int // from 1, in its list
	list  string
	line  int
}

// Budget bounds the bytes that leave the runner: the Arrow stream as it is sent, compressed. Zero means no bound.
type Budget struct {
	PerFetch int64 `json:"perFetch,omitempty"`
	PerDay   int64 `json:"perDay,omitempty"` // a day in UTC
}

// Journal is how much the runner's journal tells.
type Journal struct {
	// Query is `digest` (SHA-256 and first word), or `full` for the text beside them.
	Query string `json:"query"`
}

// Ports is a range with both its ends.
type Ports struct{ First, Last uint16 }

// String is `443` or `6000-6010`.
func (p Ports) String() string {
	if p.First == p.Last {
		return strconv.Itoa(int(p.First))
	}
	return fmt.Sprintf("%d-%d", p.First, p.Last)
}

// MarshalText is String.
func (p Ports) MarshalText() ([]byte, error) { return []byte(p.String()), nil }

// The values of Policy.Default and Journal.Query.
const (
	Allow       = "allow"
	Deny        = "deny"
	QueryDigest = "digest"
	QueryFull   = "full"
)

// Decision is what a policy says about one thing, and by which rule.
type Decision struct {
	Allowed bool   `json:"allowed"`
	Rule    string `json:"rule"` // label of the rule, `default allow`, `default deny`, or `no policy`
	rule    *Rule  // nil for a default
}

// Label is the rule's name, or its place in the file: `allow #2`.
func (r *Rule) Label() string {
	if r.Name != "" {
		return r.Name
	}
	return fmt.Sprintf("%s #%d", r.list, r.index)
}

// network and files tell whether the rule has a criterion of that sort.
func (r *Rule) network() bool { return len(r.Hosts)+len(r.CIDRs)+len(r.Ports) > 0 }
func (r *Rule) files() bool   { return len(r.Paths) > 0 }

func (r *Rule) kind(kind string) bool { return len(r.Kinds) == 0 || slices.Contains(r.Kinds, kind) }

// Kind decides before a connector starts. It is a refusal if a rule denies the whole kind, or if no rule can allow anything of it.
func (p *Policy) Kind(kind string) Decision {
	if p == nil {
		return none
	}
	for i := range p.Deny {
		if r := &p.Deny[i]; r.kind(kind) && !r.network() && !r.files() {
			return decide(r, false)
		}
	}
	for i := range p.Allow {
		if r := &p.Allow[i]; r.kind(kind) {
			return decide(r, true)
		}
	}
	return p.byDefault()
}

// Dial decides over a connection to port of ip, which host resolved to. An address that carries an IPv4 address (mapped, NAT64,
// 6to4, …) is denied by rules against that one too.
func (p *Policy) Dial(kind, host string, ip netip.Addr, port uint16) Decision {
	if p == nil {
		return none
	}
	host, ip = plainHost(host), ip.WithZone("").Unmap()
	return p.first(func(r *Rule, deny bool) bool {
		if !r.kind(kind) || r.files() || !r.port(port) || len(r.Hosts) > 0 && !r.host(host) {
			return false
		}
		if len(r.CIDRs) == 0 || r.address(ip) {
			return true
		}
		return deny && slices.ContainsFunc(source.Embedded(ip), r.address)
	})
}

// Path decides over a file: asked is its absolute path as it was asked for, actual the same with every symbolic link resolved. A
// deny rule matches either; an allow rule must match the real one.
func (p *Policy) Path(kind, asked, actual string) Decision {
	if p == nil {
		return none
	}
	return p.first(func(r *Rule, deny bool) bool {
		if !r.kind(kind) || r.network() {
			return false
		}
		if !r.files() {
			return true
		}
		return slices.ContainsFunc(r.Paths, func(root string) bool {
			if within(root, actual) || deny && within(root, asked) {
				return true
			}
			// The rule's path itself may lead over a symbolic link, which may change: it is resolved at each check.
			resolved, err := filepath.EvalSymlinks(root)
			return err == nil && resolved != root && within(resolved, actual)
		})
	})
}

// first is the decision of the first deny rule that matches, else of the first allow rule, else the default.
func (p *Policy) first(matches func(r *Rule, deny bool) bool) Decision {
	for i := range p.Deny {
		if matches(&p.Deny[i], true) {
			return decide(&p.Deny[i], false)
		}
	}
	for i := range p.Allow {
		if matches(&p.Allow[i], false) {
			return decide(&p.Allow[i], true)
		}
	}
	return p.byDefault()
}

var none = Decision{Allowed: true, Rule: "no policy"}

func decide(r *Rule, allowed bool) Decision {
	return Decision{Allowed: allowed, Rule: r.Label(), rule: r}
}

func (p *Policy) byDefault() Decision {
	return Decision{Allowed: p.Default == Allow, Rule: "default " + p.Default}
}

func (r *Rule) port(port uint16) bool {
	return len(r.Ports) == 0 || slices.ContainsFunc(r.Ports, func(p Ports) bool { return p.First <= port && port <= p.Last })
}

func (r *Rule) host(host string) bool {
	return slices.ContainsFunc(r.Hosts, func(pattern string) bool {
		if suffix, ok := strings.CutPrefix(pattern, "*"); ok {
			return strings.HasSuffix(host, suffix) && len(host) > len(suffix)
		}
		return host == pattern
	})
}

func (r *Rule) address(ip netip.Addr) bool {
	return slices.ContainsFunc(r.CIDRs, func(p netip.Prefix) bool { return p.Contains(ip) })
}

// plainHost is a name in lower case without its final dot, an address in its usual form.
func plainHost(host string) string {
	if ip, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return ip.WithZone("").Unmap().String()
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}

// within reports whether the clean absolute path name is root or below it.
func within(root, name string) bool {
	return name == root || strings.HasPrefix(name, strings.TrimSuffix(root, "/")+"/")
}

// Digest is the SHA-256 of the normal form in hex: two files that mean the same have the same. Empty for nil.
func (p *Policy) Digest() string {
	if p == nil {
		return ""
	}
	return p.digest
}

func (p *Policy) sum() string {
	text, err := json.Marshal(p)
	if err != nil {
		panic(err) // strings, numbers and prefixes
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// QueryText reports whether the journal shall hold the text of queries.
func (p *Policy) QueryText() bool { return p != nil && p.Journal.Query == QueryFull }

// Daily reports whether there is any budget a day: such a policy needs a folder for its counts. Nil has none.
func (p *Policy) Daily() bool {
	return p != nil && (p.Budget.PerDay > 0 || slices.ContainsFunc(p.Allow, func(r Rule) bool { return r.Budget != nil && r.Budget.PerDay > 0 }))
}
