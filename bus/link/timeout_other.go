//go:build !linux

package link

import (
	"net"
	"time"
)

// SetUserTimeout does nothing here: only Linux has the option.
func SetUserTimeout(net.Conn, time.Duration) error { return nil }
