package main

import (
	"log/slog"
	"net/http"
	"testing"

	"github.com/org-runink/runbus/cp/api"
	"github.com/org-runink/runbus/schemas"
)

// A kept connection is given up here before the server closes it: a fetch that is sent at that moment is lost, and nobody may send it
// again.
func TestIdleConnectionsEndHereFirst(t *testing.T) {
	c, err := newClient(endpoint{URL: "http://127.0.0.1:1", Token: schemas.NewSessionToken()})
	if err != nil {
		t.Fatal(err)
	}
	here, there := c.http.Transport.(*http.Transport).IdleConnTimeout, api.ServerOf(nil, slog.New(slog.DiscardHandler)).IdleTimeout
	if here <= 0 || here >= there {
		t.Errorf("idle connections end here after %s, there after %s", here, there)
	}
}
