package process

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

func env(vars map[string]string) func(string) string {
	return func(name string) string { return vars[name] }
}

func TestTheTextLogShowsMessagesAsTheyAre(t *testing.T) {
	var out bytes.Buffer
	log, err := NewLog(&out, env(nil))
	if err != nil {
		t.Fatal(err)
	}
	literal := schemas.EnrolmentText("bus.example:4222", "edge")
	log.Info(literal)
	log.With("part", "a b").WithGroup("g").Warn("said \"no\"\nlevel=ERROR\x1b[2J", "error", errors.New("x \"y\""))
	log.Debug("not at this level")
	lines := strings.Split(out.String(), "\n")
	if len(lines) != 3 || lines[2] != "" {
		t.Fatalf("%q", lines)
	}
	for i, want := range []string{
		`level=INFO msg=` + literal,
		`level=WARN msg=said "no"\nlevel=ERROR\x1b[2J part="a b" g.error="x \"y\""`,
	} {
		head, rest, _ := strings.Cut(lines[i], " ")
		if !strings.HasPrefix(head, "time=") || rest != want {
			t.Errorf("line %d is\n%q, want\n%q", i, rest, want)
		}
	}
}

func TestLogsOfManyGoroutinesDoNotMix(t *testing.T) {
	var out bytes.Buffer
	log, err := NewLog(&out, env(nil))
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for _, name := range []string{"a", "b", "c", "d"} {
		all.Go(func() {
			mine := log.With("who", name)
			for range 200 {
				mine.Info("of " + name)
			}
		})
	}
	all.Wait()
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	if len(lines) != 800 {
		t.Fatalf("%d lines", len(lines))
	}
	for _, l := range lines {
		if _, text, _ := strings.Cut(l, "msg=of "); len(text) == 0 || !strings.HasSuffix(l, "msg=of "+text[:1]+" who="+text[:1]) {
			t.Fatalf("%q", l)
		}
	}
}

func TestLogSettings(t *testing.T) {
	var out bytes.Buffer
	log, err := NewLog(&out, env(map[string]string{"LOG_LEVEL": "debug", "LOG_FORMAT": "JSON"}))
	if err != nil {
		t.Fatal(err)
	}
	log.Debug(schemas.RoleRunnerText)
	var line struct{ Level, Msg string }
	if err := json.Unmarshal(out.Bytes(), &line); err != nil || line.Msg != schemas.RoleRunnerText || line.Level != slog.LevelDebug.String() {
		t.Errorf("%+v, %v", line, err)
	}
	for _, vars := range []map[string]string{{"LOG_LEVEL": "loud"}, {"LOG_FORMAT": "xml"}} {
		if _, err := NewLog(&out, env(vars)); err == nil {
			t.Errorf("%v is taken", vars)
		}
	}
}
