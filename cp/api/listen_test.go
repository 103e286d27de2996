package api

import (
	"testing"

	"github.com/org-runink/runbus/schemas"
)

// A command that is pasted opens no port to others for a runner that is dialled over loopback.
func TestWhereTheCommandListens(t *testing.T) {
	for address, want := range map[string]string{
		"edge.example.com:7443": ":7443", "10.0.0.1:7443": ":7443", "[2001:db8::7]:7443": ":7443", "localhost.example.com:1": ":1",
		"localhost:7443": "localhost:7443", "LocalHost:1": "localhost:1",
		"127.0.0.1:7443": "127.0.0.1:7443", "127.1.2.3:1": "127.1.2.3:1", "[::1]:7443": "'[::1]:7443'",
	} {
		a, err := schemas.ParseAddress(address)
		if err != nil {
			t.Fatal(err)
		}
		if got := listenAt(a); got != want {
			t.Errorf("%s: --listen %s, want %s", address, got, want)
		}
	}
}
