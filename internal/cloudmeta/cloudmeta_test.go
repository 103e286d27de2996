package cloudmeta

import (
	"net/netip"
	"testing"
)

func TestAddressesOfMetadata(t *testing.T) {
	for _, s := range []string{
		"169.254.169.254", "169.254.0.1", "fe80::1", "fe80::1%eth0", "fd00:ec2::254", "100.100.100.200", "168.63.129.16", "192.0.0.192",
		"::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1", "::169.254.169.254", "2001:0:a9fe:a9fe::1",
	} {
		if Address(netip.MustParseAddr(s)) == "" {
			t.Errorf("%s is not refused", s)
		}
	}
}

func TestAddressLeavesOthersAlone(t *testing.T) {
	for _, s := range []string{
		"127.0.0.1", "::1", "10.1.2.3", "169.253.255.255", "169.255.0.0", "100.100.100.201", "192.0.0.191", "2001:db8::1", "fd00:ec3::254",
		"fec0::1", "64:ff9b::8.8.8.8", "2002:808:808::1", "::ffff:127.0.0.1", "2001:0:808:808::f7f7:f7f7",
	} {
		if rule := Address(netip.MustParseAddr(s)); rule != "" {
			t.Errorf("%s: %s", s, rule)
		}
	}
}

func TestNamesOfMetadata(t *testing.T) {
	for _, s := range []string{"metadata.google.internal", "METADATA.google.internal.", "x.metadata.goog", "instance-data.ec2.internal"} {
		if Name(s) == "" {
			t.Errorf("%s is not refused", s)
		}
	}
	for _, s := range []string{"metadata", "metadata.google.internal.example.com", "edge.example.com", ""} {
		if rule := Name(s); rule != "" {
			t.Errorf("%s: %s", s, rule)
		}
	}
}
