package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"strings"
	"syscall"
	"unicode/utf8"
)

// secretsMost is how large a file of secrets may be.
const secretsMost = 256 << 10

// readPrivate reads a regular file that its owner alone may read, or standard input for "-". what names it in errors, which show
// nothing of the content.
func readPrivate(what, name string, stdin io.Reader) ([]byte, error) {
	in := stdin
	if name != "-" {
		f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a FIFO must not hang the command
		if err != nil {
			return nil, usagef("%s can't be read: %w", what, err)
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil {
			return nil, err
		}
		if !info.Mode().IsRegular() {
			return nil, usageHint("use - and standard input for a pipe", "%s: %s is not a regular file", what, name)
		}
		if info.Mode().Perm()&0o077 != 0 {
			return nil, usageHint("chmod 600 "+name, "%s: %s is open to others (mode %04o)", what, name, info.Mode().Perm())
		}
		in = f
	}
	b, err := io.ReadAll(io.LimitReader(in, secretsMost+1))
	if err != nil {
		return nil, usagef("%s can't be read: %w", what, err)
	}
	if len(b) > secretsMost {
		return nil, usagef("%s: more than %d KiB", what, secretsMost>>10)
	}
	return b, nil
}

// readToken reads one token.
func readToken(name string, stdin io.Reader) (string, error) {
	b, err := readPrivate("the token", name, stdin)
	if err != nil {
		return "", err
	}
	return strings.TrimSpace(string(b)), nil
}

// readSecrets reads a JSON object of strings, or KEY=VALUE lines.
func readSecrets(name string, stdin io.Reader) (map[string]string, error) {
	b, err := readPrivate("the secrets", name, stdin)
	if err != nil {
		return nil, err
	}
	return parseSecrets(b)
}

// parseSecrets takes a JSON object whose values are strings, or KEY=VALUE lines. In a line the value is all behind the first =, spaces
// too; empty lines and lines that begin with # count for nothing. Its errors never show a part of a value.
func parseSecrets(b []byte) (map[string]string, error) {
	b = bytes.TrimPrefix(b, []byte("\ufeff"))
	if !utf8.Valid(b) {
		return nil, usagef("the secrets are not UTF-8")
	}
	if bytes.HasPrefix(bytes.TrimSpace(b), []byte("{")) {
		return parseJSONSecrets(b)
	}
	secrets := map[string]string{}
	n := 0
	for line := range strings.Lines(string(b)) {
		n++
		line = strings.TrimSuffix(strings.TrimSuffix(line, "\n"), "\r")
		if trimmed := strings.TrimSpace(line); trimmed == "" || trimmed[0] == '#' {
			continue
		}
		k, v, ok := strings.Cut(line, "=")
		if k = strings.TrimSpace(k); !ok || k == "" {
			return nil, usagef("line %d of the secrets is not KEY=VALUE", n)
		}
		if _, twice := secrets[k]; twice {
			return nil, usagef("line %d of the secrets names a key for the second time", n)
		}
		secrets[k] = v
	}
	return secrets, nil
}

func parseJSONSecrets(b []byte) (map[string]string, error) {
	errForm := usagef("the secrets are not a JSON object whose values are strings, each key once")
	d := json.NewDecoder(bytes.NewReader(b))
	if _, err := d.Token(); err != nil {
		return nil, errForm
	}
	secrets := map[string]string{}
	for d.More() {
		key, err := d.Token()
		k, isText := key.(string)
		if err != nil || !isText {
			return nil, errForm
		}
		value, err := d.Token()
		v, isText := value.(string)
		if err != nil || !isText {
			return nil, errForm
		}
		if _, twice := secrets[k]; twice {
			return nil, errForm
		}
		secrets[k] = v
	}
	if _, err := d.Token(); err != nil {
		return nil, errForm
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errForm
	}
	return secrets, nil
}
