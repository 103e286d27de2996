package e2e

import (
	"encoding/hex"
	"os"
	"testing"

	natsjs "github.com/nats-io/nats.go/jetstream"
)

func removeAll(t *testing.T, dir string) {
	t.Helper()
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
}

func hexOf(b []byte) string { return hex.EncodeToString(b) }

func mustStream(t *testing.T, js natsjs.JetStream, name string) natsjs.Stream {
	t.Helper()
	s, err := js.Stream(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
