package egress

import (
	"net/netip"
	"strconv"
	"strings"

	"github.com/org-runink/runbus/schemas"
)

// maxEntries bounds a list.
const maxEntries = 1000

// Entry is one entry of a list: addresses, and ports of them.
type Entry struct {
	text        string
	any         bool // every address
	prefix      netip.Prefix
	first, last uint16
}

// String is the entry as it was written.
func (e Entry) String() string { return e.text }

func (e Entry) matches(to netip.AddrPort) bool {
	return to.Port() >= e.first && to.Port() <= e.last && (e.any || e.prefix.Contains(to.Addr()))
}

func (e Entry) matchesAny(addresses []netip.Addr, port uint16) bool {
	for _, a := range addresses {
		if e.matches(netip.AddrPortFrom(a, port)) {
			return true
		}
	}
	return false
}

// Parse reads a list, the value of the variable of that name: entries with commas between them, each an address, a CIDR or `*` for
// every address, with `:PORT` or `:FIRST-LAST` behind it, or every port; IPv6 stands in brackets if a port follows. An empty list
// gives nil; one that has no entry, or one that is wrong, is an error of CodeInvalid that says which.
func Parse(variable, list string) (entries []Entry, err error) {
	if list == "" {
		return nil, nil
	}
	for text := range strings.SplitSeq(list, ",") {
		if text = strings.TrimSpace(text); text == "" {
			continue
		}
		e, why := parse(text)
		if why != "" {
			return nil, schemas.Errorf(schemas.CodeInvalid, "%s: %s %s", variable, quote(text), why).
				WithHint("entries are like 10.0.0.0/8, 192.0.2.7:7443, [2001:db8::/32]:7443-7450 or *:7443, with commas between them")
		}
		if entries = append(entries, e); len(entries) > maxEntries {
			return nil, schemas.Errorf(schemas.CodeInvalid, "%s has more than %d entries", variable, maxEntries)
		}
	}
	if len(entries) == 0 {
		return nil, schemas.Errorf(schemas.CodeInvalid, "%s is set and has no entry", variable).WithHint("unset it to have no such list")
	}
	return entries, nil
}

func parse(text string) (e Entry, wrong string) {
	e = Entry{text: text, first: 1, last: 1<<16 - 1}
	where, ports, wrong := cut(text)
	if wrong != "" {
		return e, wrong
	}
	if ports != "" {
		first, last, isRange := strings.Cut(ports, "-")
		if !isRange {
			last = first
		}
		from, err1 := strconv.ParseUint(first, 10, 16)
		to, err2 := strconv.ParseUint(last, 10, 16)
		if err1 != nil || err2 != nil || from == 0 || from > to {
			return e, "has no port from 1 to 65535, or range of them, behind its colon"
		}
		e.first, e.last = uint16(from), uint16(to)
	}
	if where == "*" {
		e.any = true
		return e, ""
	}
	prefix, err := netip.ParsePrefix(where)
	if err != nil {
		addr, err := netip.ParseAddr(where)
		if err != nil || addr.Zone() != "" {
			return e, "is no address or CIDR: names are resolved first, and then addresses are matched"
		}
		prefix = netip.PrefixFrom(addr, addr.BitLen())
	}
	if prefix.Addr().Is4In6() && prefix.Bits() >= 96 {
		prefix = netip.PrefixFrom(prefix.Addr().Unmap(), prefix.Bits()-96)
	}
	if prefix.Masked() != prefix {
		return e, "has bits behind its mask: did you mean " + prefix.Masked().String() + "?"
	}
	e.prefix = prefix
	return e, ""
}

// cut takes the ports off; "" if there are none.
func cut(text string) (where, ports, wrong string) {
	if rest, ok := strings.CutPrefix(text, "["); ok {
		where, ports, ok = strings.Cut(rest, "]")
		if !ok {
			return "", "", "opens a bracket and does not close it"
		}
		if ports != "" {
			if ports, ok = strings.CutPrefix(ports, ":"); !ok || ports == "" {
				return "", "", "has something else than a colon and ports behind its bracket"
			}
		}
		if !strings.Contains(where, ":") {
			return "", "", "has brackets around what is no IPv6 address"
		}
		return where, ports, ""
	}
	if strings.Count(text, ":") != 1 {
		return text, "", "" // IPv6 without a port
	}
	where, ports, _ = strings.Cut(text, ":")
	if ports == "" {
		return "", "", "ends with a colon"
	}
	return where, ports, ""
}

// quote shows what was written, cut if it is long.
func quote(s string) string {
	if len(s) > 80 {
		s = strings.ToValidUTF8(s[:80], "") + "…"
	}
	return strconv.Quote(s)
}
