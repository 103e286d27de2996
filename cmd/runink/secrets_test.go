package main

import (
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

func TestSecretsFromText(t *testing.T) {
	for text, want := range map[string]map[string]string{
		"":                                 {},
		"# a comment\n\npassword=p=q \r\n": {"password": "p=q "},
		" user = x\npassword= y":           {"user": " x", "password": " y"},
		"\ufeffpassword=x":                 {"password": "x"},
		` {"password":"a\nb","token":""} `: {"password": "a\nb", "token": ""},
	} {
		got, err := parseSecrets([]byte(text))
		if err != nil || !maps.Equal(got, want) {
			t.Errorf("%q: %q, %v; want %q", text, got, err, want)
		}
	}
}

func TestBadSecretsDoNotShow(t *testing.T) {
	for _, text := range []string{
		"hunter2", "=hunter2", "a=b\nhunter2\n", "a=hunter2\na=hunter2", "password=\xffhunter2",
		`{"password":hunter2}`, `{"password":["hunter2"]}`, `{"password":null}`, `{"a":"hunter2","a":"hunter2"}`, `{"a":"hunter2"} hunter2`, `{"hunter2"`, `{"a":{"hunter2":"x"}}`,
	} {
		got, err := parseSecrets([]byte(text))
		if err == nil {
			t.Errorf("%q was taken as %q", text, got)
			continue
		}
		if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q: the error shows it: %v", text, err)
		}
		if statusOf(err) != 2 {
			t.Errorf("%q: status %d", text, statusOf(err))
		}
	}
}

func TestSecretsFileIsPrivateAndRegular(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "secrets")
	if err := os.WriteFile(file, []byte("password=x"), 0o600); err != nil {
		t.Fatal(err)
	}
	link, fifo := filepath.Join(dir, "link"), filepath.Join(dir, "fifo")
	if err := errors.Join(os.Symlink(file, link), syscall.Mkfifo(fifo, 0o600)); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{file, link} {
		if got, err := readSecrets(name, nil); err != nil || got["password"] != "x" {
			t.Errorf("%s: %v %v", name, got, err)
		}
	}
	for name, want := range map[string]string{fifo: "not a regular file", dir: "not a regular file", filepath.Join(dir, "none"): "no such file"} {
		if _, err := readSecrets(name, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
	for _, mode := range []os.FileMode{0o640, 0o604, 0o644, 0o660} {
		if err := os.Chmod(file, mode); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{file, link} {
			var e *schemas.Error
			if _, err := readSecrets(name, nil); !errors.As(err, &e) || e.Hint != "chmod 600 "+name {
				t.Errorf("mode %04o of %s: %v", mode, name, err)
			}
		}
	}
	if got, err := readSecrets("-", strings.NewReader("password=x")); err != nil || got["password"] != "x" {
		t.Errorf("standard input: %v %v", got, err)
	}
	if _, err := readSecrets("-", strings.NewReader(strings.Repeat("x", secretsMost+1))); err == nil || !strings.Contains(err.Error(), "256 KiB") {
		t.Errorf("too large: %v", err)
	}
}

// Whatever comes, an error shows nothing of it, and what is taken as JSON is what the standard library reads.
func FuzzParseSecrets(f *testing.F) {
	for _, s := range []string{"", "a=b", "{}", `{"a":"b"}`, `{"a":1}`, "# x\na = b\r\n", `{"a":"\ud800"}`, "\ufeff{", "=x"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := parseSecrets(b)
		if err != nil {
			const longest = 80
			if len(err.Error()) > longest || statusOf(err) != 2 {
				t.Fatalf("%d bytes: %v", len(err.Error()), err)
			}
			return
		}
		if text := strings.TrimSpace(strings.TrimPrefix(string(b), "\ufeff")); strings.HasPrefix(text, "{") {
			var want map[string]string
			if err := json.Unmarshal([]byte(text), &want); err != nil || !maps.Equal(got, want) {
				t.Fatalf("%q: %q, want %q (%v)", b, got, want, err)
			}
		}
	})
}
