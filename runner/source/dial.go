package source

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/org-runink/runbus/internal/cloudmeta"
	"github.com/org-runink/runbus/schemas"
)

// dialTimeout bounds a dial whose dialer and context have no limit.
const dialTimeout = 30 * time.Second

// Permit decides over one address that a dial would go to: host is as it was asked for, ip what it resolved to, unmapped and
// without a zone. Nil lets it pass.
type Permit func(host string, ip netip.Addr, port uint16) error

// GuardedDial is GuardedDialBy without rules beside the fixed ones.
func GuardedDial(base *net.Dialer) func(ctx context.Context, network, addr string) (net.Conn, error) {
	return GuardedDialBy(base, nil)
}

// GuardedDialBy returns the dial hook of a runner (Env.Dial): it resolves the name, checks what comes out as ResolveFor does, and
// dials exactly the addresses it checked, one after the other, so that no second resolution can put another in their place. Only
// tcp, tcp4 and tcp6. When it fails since the context's deadline is over, the context has ended. Of base, which nobody changes any
// more, it uses resolver, timeout, keep-alive and local address; nil is a net.Dialer with a timeout of 30 s. Safe for concurrent
// use if permit is.
func GuardedDialBy(base *net.Dialer, permit Permit) func(ctx context.Context, network, addr string) (net.Conn, error) {
	dialer := base
	switch {
	case base == nil:
		dialer = &net.Dialer{Timeout: dialTimeout}
	case base.Timeout <= 0:
		own := *base
		own.Timeout = dialTimeout
		dialer = &own
	}
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, dialer.Timeout)
		defer cancel()
		conn, err := resolveAndDial(ctx, dialer, network, addr, permit)
		if end, _ := ctx.Deadline(); err != nil && !time.Now().Before(end) {
			<-ctx.Done() // due: the network's clock may ring first, and whoever asks the context next is to hear that its time is over
		}
		return conn, err
	}
}

func resolveAndDial(ctx context.Context, dialer *net.Dialer, network, addr string, permit Permit) (net.Conn, error) {
	addrs, err := ResolveFor(ctx, dialer.Resolver, network, addr, permit)
	if err != nil {
		return nil, err
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	return dialEach(ctx, dialer, network, port, host, addrs)
}

// ResolveFor is the addresses a dial to addr may go to. It refuses all if any address that comes out is a cloud-metadata or
// link-local one, in whatever form it is written or embedded (SPEC E12); no permit can allow those. Then permit, if not nil, decides
// over each: what it refuses is left out, and if nothing is left its first refusal is the error. Refusals have CodeForbiddenHop and
// name the rule. A nil resolver is the system's.
func ResolveFor(ctx context.Context, resolver *net.Resolver, network, addr string, permit Permit) ([]netip.Addr, error) {
	lookup, ok := map[string]string{"tcp": "ip", "tcp4": "ip4", "tcp6": "ip6"}[network]
	if !ok {
		return nil, schemas.Errorf(schemas.CodeForbiddenHop, "the runner does not dial over %q, only over tcp", clip(network, 20))
	}
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, schemas.Errorf(schemas.CodeBadSource, "%q is not host:port", clip(addr, 200))
	}
	if err := checkName(host); err != nil {
		return nil, err
	}
	if resolver == nil {
		resolver = net.DefaultResolver
	}
	addrs, err := resolver.LookupNetIP(ctx, lookup, host)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", host, err)
	}
	for _, ip := range addrs {
		if rule := cloudmeta.Address(ip); rule != "" {
			return nil, refused(host, ip, rule)
		}
	}
	if permit == nil {
		return addrs, nil
	}
	number, err := net.DefaultResolver.LookupPort(ctx, network, port) // a rule is about a number
	if err != nil {
		return nil, schemas.Errorf(schemas.CodeBadSource, "%q has no port", clip(addr, 200))
	}
	var allowed []netip.Addr
	var first error
	for _, ip := range addrs {
		if err := permit(host, ip.WithZone("").Unmap(), uint16(number)); err == nil { // LookupPort's are 0-65535
			allowed = append(allowed, ip)
		} else if first == nil {
			first = err
		}
	}
	if len(allowed) == 0 && first != nil {
		return nil, first
	}
	return allowed, nil
}

// dialEach dials the addresses in the resolver's order until one answers. Each gets its share of the time left.
func dialEach(ctx context.Context, dialer *net.Dialer, network, port, host string, addrs []netip.Addr) (net.Conn, error) {
	var failed []error
	for i, ip := range addrs {
		share := ctx
		if deadline, ok := ctx.Deadline(); ok {
			var cancel context.CancelFunc
			share, cancel = context.WithTimeout(ctx, time.Until(deadline)/time.Duration(len(addrs)-i))
			defer cancel()
		}
		conn, err := dialer.DialContext(share, network, net.JoinHostPort(ip.Unmap().String(), port))
		if err == nil {
			return conn, nil
		}
		failed = append(failed, err)
		if ctx.Err() != nil {
			break
		}
	}
	if len(failed) == 0 {
		return nil, fmt.Errorf("dial %s: no address", host)
	}
	return nil, errors.Join(failed...)
}

func refused(host string, ip netip.Addr, rule string) error {
	what := clip(host, 200)
	if to := ip.Unmap(); to.IsValid() && to.String() != host { // a resolver gives IPv4 addresses in IPv6's form
		what += " (" + to.String() + ")"
	}
	return schemas.Errorf(schemas.CodeForbiddenHop, "the runner does not dial %s: %s", what, rule).
		WithHint("cloud-metadata addresses are refused always; no setting allows them")
}

// CheckHost refuses, before it is resolved, what no runner dials: an empty host, and what checkName refuses.
func CheckHost(host string) error { return checkName(host) }

// checkName refuses the names of metadata services and the number forms that some resolvers take for an IPv4 address.
func checkName(host string) error {
	if host == "" {
		return schemas.Errorf(schemas.CodeBadSource, "the address has no host")
	}
	name := strings.ToLower(strings.TrimRight(host, "."))
	if rule := cloudmeta.Name(host); rule != "" {
		return refused(host, netip.Addr{}, rule)
	}
	if _, err := netip.ParseAddr(host); err == nil || strings.Contains(host, ":") {
		return nil
	}
	last := name[strings.LastIndexByte(name, '.')+1:]
	if isNumber(last) {
		return schemas.Errorf(schemas.CodeForbiddenHop, "the runner does not dial %s: a number that is not a dotted IPv4 address", clip(host, 200)).
			WithHint("write an IPv4 address as four decimal numbers without leading zeros")
	}
	return nil
}

// isNumber reports whether inet_aton would take s for a number: decimal, octal or hexadecimal. No top-level domain is one.
func isNumber(s string) bool {
	if hex, ok := strings.CutPrefix(s, "0x"); ok {
		return strings.Trim(hex, "0123456789abcdef") == ""
	}
	return s != "" && strings.Trim(s, "0123456789") == ""
}

// Embedded are the IPv4 addresses that an IPv6 address may carry, in every form of translation and tunnel: a rule against one of
// them is a rule against ip too.
func Embedded(ip netip.Addr) []netip.Addr { return cloudmeta.Embedded(ip) }
