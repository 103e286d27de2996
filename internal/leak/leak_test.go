package leak

import (
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func stay(until <-chan struct{}, ended chan<- struct{}) {
	<-until
	close(ended)
}

// What goes on is found, by name, and what has ended is not.
func TestFind(t *testing.T) {
	before := []goleak.Option{goleak.IgnoreCurrent()}
	until, ended := make(chan struct{}), make(chan struct{})
	go stay(until, ended)
	if err := find(0, before); err == nil || !strings.Contains(err.Error(), "leak.stay") {
		t.Errorf("while it goes on: %v", err)
	}
	close(until)
	<-ended
	if err := Find(before...); err != nil {
		t.Errorf("after its end: %v", err)
	}
}
