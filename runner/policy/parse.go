package policy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// What a policy file may be at most.
const (
	maxFile   = 1 << 20 // bytes
	maxRules  = 1000    // in each list
	maxList   = 1000    // entries
	maxErrors = 20      // shown
)

// Parse reads a policy. kinds are the source kinds of this build: a rule that names another is an error, so that a slip can't switch
// it off. Unknown and repeated fields, anchors and a second document are errors too. An error lists what is wrong, each with its
// line, as `line 4: …`.
func Parse(text []byte, kinds []string) (*Policy, error) {
	if len(text) > maxFile {
		return nil, fmt.Errorf("the policy has %d bytes: at most %d are allowed", len(text), maxFile)
	}
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	var document, second yaml.Node
	if err := decoder.Decode(&document); errors.Is(err, io.EOF) {
		return nil, errors.New("line 1: the policy is empty: write `version: 1` and the rules")
	} else if err != nil {
		return nil, errors.New(strings.TrimPrefix(err.Error(), "yaml: "))
	}
	if len(document.Content) != 1 {
		return nil, errors.New("line 1: the policy is empty: write `version: 1` and the rules")
	}
	if err := decoder.Decode(&second); !errors.Is(err, io.EOF) {
		return nil, errors.New("the policy must be one YAML document")
	}
	p := &parser{kinds: kinds, names: map[string]int{}}
	policy := p.policy(document.Content[0])
	if len(p.errs) > 0 {
		if more := len(p.errs) - maxErrors; more > 0 {
			p.errs = append(p.errs[:maxErrors], fmt.Errorf("… and %d more", more))
		}
		return nil, errors.Join(p.errs...)
	}
	policy.digest = policy.sum()
	return policy, nil
}

type parser struct {
	kinds []string
	names map[string]int // of rules, with their lines
	errs  []error
}

func (p *parser) fail(n *yaml.Node, format string, args ...any) {
	p.errs = append(p.errs, fmt.Errorf("line %d: %s", n.Line, fmt.Sprintf(format, args...)))
}

// fields calls the function of each field that a mapping has. One without a function, or there twice, is an error.
func (p *parser) fields(n *yaml.Node, what string, known map[string]func(*yaml.Node)) {
	if n.Kind != yaml.MappingNode {
		p.fail(n, "%s must be a mapping of fields to values", what)
		return
	}
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		read, ok := known[key.Value]
		switch before, again := seen[key.Value], seen[key.Value] > 0; {
		case key.Kind != yaml.ScalarNode || !ok:
			names := make([]string, 0, len(known))
			for name := range known {
				names = append(names, name)
			}
			slices.Sort(names)
			p.fail(key, "%s has no field %s: it has %s", what, quote(key.Value), strings.Join(names, ", "))
		case again:
			p.fail(key, "field %s of %s stands on line %d already", quote(key.Value), what, before)
		default:
			seen[key.Value] = key.Line
			if p.plain(value) {
				read(value)
			}
		}
	}
}

// plain refuses anchors and aliases: one place of a rule could change another.
func (p *parser) plain(n *yaml.Node) bool {
	if n.Kind == yaml.AliasNode || n.Anchor != "" {
		p.fail(n, "anchors and aliases are not allowed")
		return false
	}
	return true
}

func (p *parser) policy(n *yaml.Node) *Policy {
	policy := &Policy{Default: Deny, Allow: []Rule{}, Deny: []Rule{}, Journal: Journal{Query: QueryDigest}}
	version := false
	if !p.plain(n) {
		return policy
	}
	p.fields(n, "the policy", map[string]func(*yaml.Node){
		"version": func(n *yaml.Node) {
			version = true
			if n.Kind != yaml.ScalarNode || n.Value != "1" {
				p.fail(n, "version must be 1")
			}
		},
		"default": func(n *yaml.Node) { policy.Default = p.oneOf(n, "default", Allow, Deny) },
		"allow":   func(n *yaml.Node) { policy.Allow = p.rules(n, Allow) },
		"deny":    func(n *yaml.Node) { policy.Deny = p.rules(n, Deny) },
		"budget":  func(n *yaml.Node) { policy.Budget = p.budget(n) },
		"journal": func(n *yaml.Node) {
			p.fields(n, "journal", map[string]func(*yaml.Node){
				"query": func(n *yaml.Node) { policy.Journal.Query = p.oneOf(n, "query", QueryDigest, QueryFull) },
			})
		},
	})
	if !version {
		p.fail(n, "the policy has no version: write `version: 1`")
	}
	return policy
}

func (p *parser) oneOf(n *yaml.Node, field string, values ...string) string {
	if n.Kind != yaml.ScalarNode || !slices.Contains(values, n.Value) {
		p.fail(n, "%s must be %s", field, strings.Join(values, " or "))
	}
	return n.Value
}

// each calls read for the scalars of a list.
func (p *parser) each(n *yaml.Node, field string, read func(*yaml.Node)) {
	if n.Kind != yaml.SequenceNode || len(n.Content) == 0 {
		p.fail(n, "%s must be a list with at least one entry", field)
		return
	}
	if len(n.Content) > maxList {
		p.fail(n, "%s has %d entries: at most %d are allowed", field, len(n.Content), maxList)
		return
	}
	for _, entry := range n.Content {
		switch {
		case !p.plain(entry):
		case entry.Kind != yaml.ScalarNode || entry.Value == "":
			p.fail(entry, "an entry of %s must be a text", field)
		default:
			read(entry)
		}
	}
}

func (p *parser) rules(n *yaml.Node, list string) []Rule {
	rules := []Rule{}
	if n.Kind != yaml.SequenceNode {
		p.fail(n, "%s must be a list of rules", list)
		return rules
	}
	if len(n.Content) > maxRules {
		p.fail(n, "%s has %d rules: at most %d are allowed", list, len(n.Content), maxRules)
		return rules
	}
	for i, entry := range n.Content {
		if p.plain(entry) {
			rules = append(rules, p.rule(entry, list, i+1))
		}
	}
	return rules
}

func (p *parser) rule(n *yaml.Node, list string, index int) Rule {
	r := Rule{list: list, index: index, line: n.Line}
	what := fmt.Sprintf("rule %s #%d", list, index)
	p.fields(n, what, map[string]func(*yaml.Node){
		"name": func(n *yaml.Node) { r.Name = p.name(n) },
		"kinds": func(n *yaml.Node) {
			p.each(n, "kinds", func(n *yaml.Node) { r.Kinds = append(r.Kinds, p.oneOf(n, "a kind", p.kinds...)) })
		},
		"hosts": func(n *yaml.Node) { p.each(n, "hosts", func(n *yaml.Node) { r.Hosts = append(r.Hosts, p.host(n)) }) },
		"cidrs": func(n *yaml.Node) { p.each(n, "cidrs", func(n *yaml.Node) { r.CIDRs = append(r.CIDRs, p.cidr(n)) }) },
		"ports": func(n *yaml.Node) { p.each(n, "ports", func(n *yaml.Node) { r.Ports = append(r.Ports, p.ports(n)) }) },
		"paths": func(n *yaml.Node) { p.each(n, "paths", func(n *yaml.Node) { r.Paths = append(r.Paths, p.path(n)) }) },
		"budget": func(n *yaml.Node) {
			if list == Deny {
				p.fail(n, "%s can't have a budget: what it matches is refused", what)
				return
			}
			b := p.budget(n)
			r.Budget = &b
		},
	})
	r.Kinds, r.Hosts, r.Paths = set(r.Kinds, strings.Compare), set(r.Hosts, strings.Compare), set(r.Paths, strings.Compare)
	r.CIDRs = set(r.CIDRs, netip.Prefix.Compare)
	r.Ports = set(r.Ports, func(a, b Ports) int { return 1<<16*(int(a.First)-int(b.First)) + int(a.Last) - int(b.Last) })
	switch {
	case r.network() && r.files():
		p.fail(n, "%s has paths beside hosts, cidrs or ports: make it two rules, nothing meets both", what)
	case n.Kind == yaml.MappingNode && !r.network() && !r.files() && len(r.Kinds) == 0:
		p.fail(n, "%s has none of kinds, hosts, cidrs, ports, paths: for everything write `default: %s`", what, list)
	case r.Budget != nil && r.Budget.PerDay > 0 && r.Name == "":
		p.fail(n, "%s has a budget a day and no name: it is counted by its name", what)
	}
	return r
}

func set[E comparable](list []E, compare func(a, b E) int) []E {
	slices.SortFunc(list, compare)
	return slices.Compact(list)
}

// name is 1-64 letters, digits and `.-_`: it is counted by, shown, and no secret.
func (p *parser) name(n *yaml.Node) string {
	name := n.Value
	bad := func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && !strings.ContainsRune("-_.", c)
	}
	switch before, taken := p.names[name]; {
	case n.Kind != yaml.ScalarNode || name == "" || len(name) > 64 || strings.ContainsFunc(name, bad):
		p.fail(n, "a name has 1-64 letters, digits and - _ .")
	case taken:
		p.fail(n, "the name %s is that of the rule on line %d", quote(name), before)
	default:
		p.names[name] = n.Line
	}
	return name
}

func (p *parser) host(n *yaml.Node) string {
	host := plainHost(n.Value)
	if _, err := netip.ParseAddr(host); err == nil {
		return host
	}
	name := strings.TrimPrefix(host, "*.")
	bad := func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < '0' || c > '9') && !strings.ContainsRune("-_.", c)
	}
	if name == "" || len(name) > 253 || strings.ContainsFunc(name, bad) || name[0] == '.' || strings.Contains(name, "..") {
		p.fail(n, "the host %s is not a name, an address or *.suffix (without scheme and port; letters beyond ASCII as punycode)", quote(n.Value))
	}
	return host
}

func (p *parser) cidr(n *yaml.Node) netip.Prefix {
	prefix, err := netip.ParsePrefix(n.Value)
	if err != nil {
		addr, err := netip.ParseAddr(n.Value)
		if err != nil || addr.Zone() != "" {
			p.fail(n, "%s is not an address or CIDR such as 10.0.0.0/8", quote(n.Value))
			return netip.Prefix{}
		}
		prefix = netip.PrefixFrom(addr, addr.BitLen())
	}
	if prefix.Addr().Is4In6() && prefix.Bits() >= 96 {
		prefix = netip.PrefixFrom(prefix.Addr().Unmap(), prefix.Bits()-96)
	}
	if prefix.Masked() != prefix {
		p.fail(n, "%s has bits behind its mask: did you mean %s?", quote(n.Value), prefix.Masked())
	}
	return prefix
}

func (p *parser) ports(n *yaml.Node) Ports {
	first, last, isRange := strings.Cut(n.Value, "-")
	if !isRange {
		last = first
	}
	from, err1 := strconv.ParseUint(strings.TrimSpace(first), 10, 16)
	to, err2 := strconv.ParseUint(strings.TrimSpace(last), 10, 16)
	if err1 != nil || err2 != nil || from == 0 || from > to {
		p.fail(n, "%s is not a port from 1 to 65535 or a range such as 6000-6010", quote(n.Value))
	}
	return Ports{First: uint16(from), Last: uint16(to)}
}

func (p *parser) path(n *yaml.Node) string {
	if !filepath.IsAbs(n.Value) || strings.ContainsRune(n.Value, 0) || slices.Contains(strings.Split(n.Value, "/"), "..") {
		p.fail(n, "the path %s must be absolute, without `..`", quote(n.Value))
	} else if strings.ContainsAny(n.Value, "*?[") {
		p.fail(n, "the path %s has a wildcard: name the folder, all that is below it is meant", quote(n.Value))
	}
	return filepath.Clean(n.Value)
}

func (p *parser) budget(n *yaml.Node) Budget {
	var b Budget
	p.fields(n, "budget", map[string]func(*yaml.Node){
		"perFetch": func(n *yaml.Node) { b.PerFetch = p.size(n) },
		"perDay":   func(n *yaml.Node) { b.PerDay = p.size(n) },
	})
	return b
}

var units = []struct {
	suffix string
	factor int64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40},
	{"kB", 1e3}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"B", 1}, {"", 1},
}

// size is a positive number of bytes, with a unit or without.
func (p *parser) size(n *yaml.Node) int64 {
	for _, u := range units {
		digits, ok := strings.CutSuffix(n.Value, u.suffix)
		if !ok || n.Kind != yaml.ScalarNode {
			continue
		}
		size, err := strconv.ParseInt(strings.TrimSpace(digits), 10, 64)
		if err != nil || size <= 0 || size > math.MaxInt64/u.factor {
			break
		}
		return size * u.factor
	}
	p.fail(n, "%s is not a size such as 500MiB or 20GB", quote(n.Value))
	return 0
}

// quote shows what was written, cut if it is long.
func quote(s string) string {
	if len(s) > 80 {
		s = strings.ToValidUTF8(s[:80], "") + "…"
	}
	return strconv.Quote(s)
}
