package process

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"unicode"
)

// NewLog is a logger on w as LOG_LEVEL (debug, info, warn, error; default info) and LOG_FORMAT (text, json; default text)
// say. In text a message stands as it is, without quotes around or in it: operators look for the texts that are part of the
// interface.
func NewLog(w io.Writer, getenv func(string) string) (*slog.Logger, error) {
	var level slog.Level
	if v := getenv("LOG_LEVEL"); v != "" {
		if err := level.UnmarshalText([]byte(v)); err != nil {
			return nil, fmt.Errorf("LOG_LEVEL is %q: use debug, info, warn or error", v)
		}
	}
	switch v := strings.ToLower(getenv("LOG_FORMAT")); v {
	case "", "text":
		return slog.New(newTextLog(w, level)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: level})), nil
	default:
		return nil, fmt.Errorf("LOG_FORMAT is %q: use text or json", v)
	}
}

// textLog writes the lines of slog.TextHandler, but the message as it is.
type textLog struct {
	slog.Handler // writes everything but the message to line
	out          *lineOut
}

// lineOut is what the handlers of one log share.
type lineOut struct {
	mu   sync.Mutex
	w    io.Writer
	line bytes.Buffer
}

func newTextLog(w io.Writer, level slog.Level) textLog {
	out := &lineOut{w: w}
	return textLog{out: out, Handler: slog.NewTextHandler(&out.line, &slog.HandlerOptions{
		Level: level,
		ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
			if len(groups) == 0 && a.Key == slog.MessageKey {
				return slog.Attr{}
			}
			return a
		},
	})}
}

// Handle writes one line: time, level, message, attributes.
func (t textLog) Handle(ctx context.Context, r slog.Record) error {
	t.out.mu.Lock()
	defer t.out.mu.Unlock()
	t.out.line.Reset()
	if err := t.Handler.Handle(ctx, r); err != nil {
		return err
	}
	whole := t.out.line.String()
	head := strings.Index(whole, slog.LevelKey+"=")
	head += strings.IndexAny(whole[head:], " \n")
	_, err := io.WriteString(t.out.w, whole[:head]+" "+slog.MessageKey+"="+oneLine(r.Message)+whole[head:])
	return err
}

// WithAttrs adds attributes to each line.
func (t textLog) WithAttrs(attrs []slog.Attr) slog.Handler {
	return textLog{Handler: t.Handler.WithAttrs(attrs), out: t.out}
}

// WithGroup names a group of the attributes that follow.
func (t textLog) WithGroup(name string) slog.Handler {
	return textLog{Handler: t.Handler.WithGroup(name), out: t.out}
}

// oneLine escapes what would end the line or move a terminal's cursor.
func oneLine(s string) string {
	if !strings.ContainsFunc(s, unicode.IsControl) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		if unicode.IsControl(r) {
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
			continue
		}
		b.WriteRune(r)
	}
	return b.String()
}
