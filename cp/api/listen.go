package api

import (
	"net/netip"
	"strconv"

	"github.com/org-runink/runbus/schemas"
)

// listenAt is where a runner of this address listens, as one word of a shell: on each address of its host, since what a name or an address
// is to those who dial need not be one of the host's own; at `localhost` or a loopback address on that alone, since nobody else can dial
// it there.
func listenAt(a schemas.Address) string {
	if a.Host == "localhost" {
		return a.String()
	}
	if ip, err := netip.ParseAddr(a.Host); err != nil || !ip.IsLoopback() {
		return ":" + strconv.Itoa(int(a.Port))
	} else if ip.Is6() {
		return shellQuoted(a.String()) // for the brackets
	}
	return a.String()
}
