package policy

import (
	"fmt"
	"strings"
)

// Text is the policy's normal form for people: a rule a line, in the order in which they are asked.
func (p *Policy) Text() string {
	var out strings.Builder
	for _, rules := range [][]Rule{p.Deny, p.Allow} {
		for i := range rules {
			fmt.Fprintf(&out, "%-5s  %s\n", rules[i].list, rules[i].text())
		}
	}
	fmt.Fprintf(&out, "%-5s  everything else\n", p.Default)
	if b := p.Budget.text(); b != "" {
		fmt.Fprintf(&out, "budget of all fetches: %s\n", b)
	}
	fmt.Fprintf(&out, "journal: query %s\ndigest %s\n", p.Journal.Query, p.Digest())
	return out.String()
}

func (r *Rule) text() string {
	parts := []string{fmt.Sprintf("%q (line %d)", r.Label(), r.line)}
	add := func(what string, n int, list any) {
		if n > 0 {
			parts = append(parts, fmt.Sprintf("%s=%s", what, strings.ReplaceAll(strings.Trim(fmt.Sprint(list), "[]"), " ", ",")))
		}
	}
	add("kinds", len(r.Kinds), r.Kinds)
	add("hosts", len(r.Hosts), r.Hosts)
	add("cidrs", len(r.CIDRs), r.CIDRs)
	add("ports", len(r.Ports), r.Ports)
	if len(r.Paths) > 0 {
		parts = append(parts, fmt.Sprintf("paths=%q", r.Paths))
	}
	if r.Budget != nil {
		parts = append(parts, r.Budget.text())
	}
	return strings.Join(parts, "  ")
}

func (b Budget) text() string {
	var parts []string
	if b.PerFetch > 0 {
		parts = append(parts, fmt.Sprintf("%d bytes a fetch", b.PerFetch))
	}
	if b.PerDay > 0 {
		parts = append(parts, fmt.Sprintf("%d bytes a day", b.PerDay))
	}
	return strings.Join(parts, ", ")
}
