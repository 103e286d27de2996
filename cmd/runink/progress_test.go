package main

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"
)

// A fetch may end before its bar was shown once: the bar ends all the same.
func TestABarEndsBeforeItBegan(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "screen"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // so that what draws it begins when this here waits
	newBar(f).stop()
}
