// Package cloudmeta knows where the clouds serve metadata and credentials to their machines: nothing here ever dials there, neither a
// runner for a source (SPEC E12) nor a control plane for a runner.
package cloudmeta

import (
	"net/netip"
	"strings"
)

// names are those of metadata services; domains below them count too.
var names = []string{
	"metadata.google.internal", "metadata.goog", "instance-data.ec2.internal", "metadata.tencentyun.com",
	"metadata.platformequinix.com", "metadata.packet.net",
}

// Name is the rule that refuses host before it is resolved, empty if none does.
func Name(host string) string {
	name := strings.ToLower(strings.TrimRight(host, "."))
	for _, m := range names {
		if name == m || strings.HasSuffix(name, "."+m) {
			return "the name of a cloud-metadata service (" + m + ")"
		}
	}
	return ""
}

// The addresses, each with its rule. What the clouds document: AWS, Azure, Google, Alibaba, Oracle.
var forbiddenPrefixes = []struct {
	prefix netip.Prefix
	rule   string
}{
	{netip.MustParsePrefix("169.254.0.0/16"), "link-local, where cloud metadata is (169.254.0.0/16)"},
	{netip.MustParsePrefix("fe80::/10"), "link-local (fe80::/10)"},
	{netip.MustParsePrefix("fd00:ec2::/32"), "cloud metadata of AWS (fd00:ec2::/32)"},
	{netip.MustParsePrefix("fd20:ce::254/128"), "cloud metadata of Google (fd20:ce::254)"},
	{netip.MustParsePrefix("100.100.100.200/32"), "cloud metadata of Alibaba (100.100.100.200)"},
	{netip.MustParsePrefix("168.63.129.16/32"), "the wire server of Azure (168.63.129.16)"},
	{netip.MustParsePrefix("192.0.0.192/32"), "cloud metadata of Oracle (192.0.0.192)"},
}

// Address is the rule that refuses ip, empty if none does. An IPv6 address that carries an IPv4 address is as forbidden as
// that is.
func Address(ip netip.Addr) string {
	ip = ip.WithZone("").Unmap()
	for _, f := range forbiddenPrefixes {
		if f.prefix.Contains(ip) {
			return f.rule
		}
	}
	for _, v4 := range Embedded(ip) {
		if rule := Address(v4); rule != "" {
			return rule + ", embedded in an IPv6 address"
		}
	}
	return ""
}

var (
	compatible = netip.MustParsePrefix("::/96")           // RFC 4291, deprecated
	translated = netip.MustParsePrefix("::ffff:0:0:0/96") // RFC 2765
	nat64      = netip.MustParsePrefix("64:ff9b::/96")    // RFC 6052
	nat64Local = netip.MustParsePrefix("64:ff9b:1::/48")  // RFC 8215
	sixToFour  = netip.MustParsePrefix("2002::/16")       // RFC 3056
	teredo     = netip.MustParsePrefix("2001::/32")       // RFC 4380
)

// Embedded are the IPv4 addresses that an IPv6 address may carry, in every form of translation and tunnel: a rule against one of
// them is a rule against ip too.
func Embedded(ip netip.Addr) []netip.Addr {
	if !ip.Is6() {
		return nil
	}
	b := ip.As16()
	v4 := func(w, x, y, z int) netip.Addr { return netip.AddrFrom4([4]byte{b[w], b[x], b[y], b[z]}) }
	last := v4(12, 13, 14, 15)
	switch {
	case compatible.Contains(ip), translated.Contains(ip), nat64.Contains(ip):
		return []netip.Addr{last}
	case nat64Local.Contains(ip): // its prefix may have 48, 56, 64 or 96 bits; byte 8 is left out
		return []netip.Addr{last, v4(6, 7, 9, 10), v4(7, 9, 10, 11), v4(9, 10, 11, 12)}
	case sixToFour.Contains(ip):
		return []netip.Addr{v4(2, 3, 4, 5)}
	case teredo.Contains(ip):
		return []netip.Addr{v4(4, 5, 6, 7), netip.AddrFrom4([4]byte{^b[12], ^b[13], ^b[14], ^b[15]})}
	case b[9] == 0 && b[10] == 0x5e && b[11] == 0xfe && b[8]&^2 == 0: // ISATAP, RFC 5214
		return []netip.Addr{last}
	}
	return nil
}
