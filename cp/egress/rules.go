// Package egress decides which addresses a control plane dials for the people of its tenants. They choose where their runners are
// dialled and read why that failed: without rules they could look around in the control plane's own network.
package egress

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/org-runink/runbus/internal/cloudmeta"
)

// The variables that bring the lists of the operator.
const (
	EnvAllow = "CORE_RUNNER_DIAL_ALLOW"
	EnvDeny  = "CORE_RUNNER_DIAL_DENY"
)

// Rules are what holds for every dial, over the address that is connected to after names were resolved. Cloud metadata, and what no
// single host has, are refused in any case: the zero value refuses nothing else. Safe for concurrent use, unchanged.
type Rules struct {
	// Allow, if not empty, is all that is dialled.
	Allow []Entry
	// Deny wins over Allow.
	Deny []Entry
	// Shared refuses the addresses of this host, loopback among them, but those that Allow names one by one (or as a part of
	// loopback): it is for a control plane that others reach, so that its tenants' people don't reach what listens beside it.
	Shared bool
	// Own are the control plane's own listeners, each an IP address, which may be the unspecified one, and a port: refused in any
	// case. Nil: none.
	Own func() []netip.AddrPort
}

// Refuses is the rule that forbids to dial to, in words that may be shown to whoever chose the address; empty if none does. It says
// the same whether or not anything listens there: nothing is sent.
func (r Rules) Refuses(to netip.AddrPort) string {
	ip := to.Addr().WithZone("").Unmap()
	to = netip.AddrPortFrom(ip, to.Port())
	if !ip.IsValid() || ip.IsUnspecified() || ip.IsMulticast() || ip == broadcast {
		return "no single host has that address"
	}
	if rule := cloudmeta.Address(ip); rule != "" {
		return rule
	}
	if rule := r.ownHost(to); rule != "" {
		return rule
	}
	for _, e := range r.Deny {
		if e.matches(to) || e.matchesAny(cloudmeta.Embedded(ip), to.Port()) {
			return fmt.Sprintf("%s has %s", EnvDeny, e)
		}
	}
	if len(r.Allow) > 0 && !matches(r.Allow, to) {
		return EnvAllow + " does not have it"
	}
	return ""
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// ownHost is the rule on the host of the control plane.
func (r Rules) ownHost(to netip.AddrPort) string {
	own, err := isOwn(to.Addr())
	if err != nil {
		return "which addresses are its own could not be found out"
	}
	if !own {
		return ""
	}
	if r.Shared && !r.opened(to) {
		return "it is on the control plane's own host, of which it dials only what " + EnvAllow + " names"
	}
	if r.Own == nil {
		return ""
	}
	for _, listens := range r.Own() {
		at := listens.Addr().Unmap()
		if listens.Port() == to.Port() && (at.IsUnspecified() || at == to.Addr()) {
			return "it is the control plane itself"
		}
	}
	return ""
}

// opened reports whether Allow names an address of this host: as such, not as one of many.
func (r Rules) opened(to netip.AddrPort) bool {
	for _, e := range r.Allow {
		if e.matches(to) && (e.prefix.IsSingleIP() || e.prefix.Addr().IsLoopback()) {
			return true
		}
	}
	return false
}

// isOwn reports whether ip, or an IPv4 address that it carries, leads to this host.
func isOwn(ip netip.Addr) (bool, error) {
	all := append(cloudmeta.Embedded(ip), ip)
	for _, a := range all {
		if a.IsLoopback() || a.Is4() && a.As4()[0] == 0 { // Linux takes 0.0.0.0/8 for itself
			return true, nil
		}
	}
	interfaces, err := net.InterfaceAddrs()
	if err != nil {
		return false, err
	}
	for _, i := range interfaces {
		n, ok := i.(*net.IPNet)
		if !ok {
			continue
		}
		own, _ := netip.AddrFromSlice(n.IP)
		for _, a := range all {
			if own.Unmap() == a {
				return true, nil
			}
		}
	}
	return false, nil
}

func matches(list []Entry, to netip.AddrPort) bool {
	for _, e := range list {
		if e.matches(to) {
			return true
		}
	}
	return false
}
