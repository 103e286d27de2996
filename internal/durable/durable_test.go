package durable_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"github.com/org-runink/runbus/internal/durable"
)

func check(t *testing.T, file, want string) {
	t.Helper()
	body, err := os.ReadFile(file)
	if err != nil || string(body) != want {
		t.Fatalf("%q, %v", body, err)
	}
	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatal(info.Mode(), err)
	}
	entries, err := os.ReadDir(filepath.Dir(file))
	if err != nil || len(entries) != 1 {
		t.Fatal("left over:", entries, err)
	}
}

func TestReplaceAndRemove(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	var steps []string
	step := func(name string) { steps = append(steps, name) }
	for _, body := range []string{"one", "two", ""} {
		if err := durable.Replace(file, []byte(body), step); err != nil {
			t.Fatal(err)
		}
		check(t, file, body)
	}
	if len(steps) != 9 || steps[0] != "file: made" || steps[2] != "file: placed" {
		t.Error(steps)
	}
	for range 2 { // what is gone is fine
		if err := durable.Remove(file, step); err != nil {
			t.Fatal(err)
		}
	}
	if len(steps) != 10 || steps[9] != "file: removed" {
		t.Error(steps)
	}
	if err := durable.Replace(filepath.Join(t.TempDir(), "missing", "file"), nil, nil); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

func TestOneOfManyCreates(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	var makers sync.WaitGroup
	made := make(chan string, 20)
	for i := range 20 {
		makers.Go(func() {
			body := string(rune('a' + i))
			switch err := durable.Create(file, []byte(body), nil); {
			case err == nil:
				made <- body
			case !errors.Is(err, fs.ErrExist):
				t.Error(err)
			}
		})
	}
	makers.Wait()
	if len(made) != 1 {
		t.Fatalf("%d have made it", len(made))
	}
	check(t, file, <-made)
}

// TestACrashLeavesTheOldContent stops at each step of a write, as a crash would.
func TestACrashLeavesTheOldContent(t *testing.T) {
	for _, step := range []string{"file: made", "file: written", "file: placed"} {
		file := filepath.Join(t.TempDir(), "file")
		if err := durable.Replace(file, []byte("old"), nil); err != nil {
			t.Fatal(err)
		}
		crashed := make(chan struct{})
		go func() { // goexit runs the clean-up of Replace; the temporary file of a true crash is made below
			defer close(crashed)
			_ = durable.Replace(file, []byte("new"), func(name string) {
				if name == step {
					_ = os.WriteFile(filepath.Join(filepath.Dir(file), ".file.123"), []byte("ne"), 0o600)
					runtime.Goexit()
				}
			})
		}()
		<-crashed
		want := "old"
		if step == "file: placed" {
			want = "new"
		}
		if err := durable.RemoveTemp(file); err != nil {
			t.Fatal(err)
		}
		check(t, file, want)
	}
}
