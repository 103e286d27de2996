package embedded

import (
	"context"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"sync/atomic"
)

// bridge writes the server's log into slog, under part=nats-server.
//
//   - What the server says of itself while it starts and stops is Debug, later Info.
//   - What a client did wrong (violations, failed handshakes) and slow consumers are Warn: the server itself is well.
//   - That a runner in JAIL can't have back the subscriptions it had is Debug: the callout has told why it is there.
//   - Its own errors are Error.
//   - Debug and trace are off: a trace would show the protocol, CONNECT lines with credentials included.
//
// Anything in the form of a credential is cut out, since a client may put one where a name belongs.
type bridge struct {
	log   *slog.Logger
	quiet atomic.Bool            // starting or stopping
	fatal atomic.Pointer[string] // the first fatal error; the server goes on as if nothing had happened
}

func newBridge(log *slog.Logger) *bridge {
	b := &bridge{log: log.With(slog.String("part", "nats-server"))}
	b.quiet.Store(true)
	return b
}

// Noticef implements server.Logger.
func (b *bridge) Noticef(format string, v ...any) {
	text := redact(fmt.Sprintf(format, v...))
	level := slog.LevelInfo
	switch {
	case strings.Contains(text, "Slow Consumer"):
		level = slog.LevelWarn
	case b.quiet.Load():
		level = slog.LevelDebug
	}
	b.log.Log(context.Background(), level, text)
}

// Warnf implements server.Logger.
func (b *bridge) Warnf(format string, v ...any) { b.log.Warn(redact(fmt.Sprintf(format, v...))) }

// Errorf implements server.Logger.
func (b *bridge) Errorf(format string, v ...any) {
	text := redact(fmt.Sprintf(format, v...))
	switch {
	case isJailedAgain(text):
		b.log.Debug(text)
		return
	case ofClient.MatchString(text):
		b.log.Warn(text)
		return
	}
	b.log.Error(text)
}

// Fatalf implements server.Logger. Start returns the first one as its error; the process is not ended.
func (b *bridge) Fatalf(format string, v ...any) {
	text := redact(fmt.Sprintf(format, v...))
	b.fatal.CompareAndSwap(nil, &text)
	b.log.Error(text)
}

// Debugf implements server.Logger and drops.
func (b *bridge) Debugf(string, ...any) {}

// Tracef implements server.Logger and drops.
func (b *bridge) Tracef(string, ...any) {}

var (
	// ofClient is how the server begins a line about one client: `127.0.0.1:4711 - cid:5 - …`, `wid` for WebSocket.
	ofClient = regexp.MustCompile(`^\S+ - w?c?id:\d+ - `)
	// credential is every form of one: tokens of this platform, nkey seeds, JWTs.
	credential = regexp.MustCompile(`(?:rsk1|rst1|crt1)\.[\w.-]+|\bS[A-Z][A-Z2-7]{56,}|\beyJ[\w.-]+`)
)

// jailed is the line about a subscription that a client in JAIL may not have: the runner id it gave, and the one of the subject.
var jailed = regexp.MustCompile(`^\S+ - w?c?id:\d+ - .* - "JAIL/user:refused:([\w.-]+)" - Subscription Violation - Subject "runbus\.v1\.[\w-]+\.runner\.([\w=-]+)\.(?:work|control|credit)\.[\w*]+", SID \d+$`)

// isJailedAgain reports whether a runner in JAIL asked for what it had under its own id while it was let in; its client does at each new link.
func isJailedAgain(text string) bool {
	m := jailed.FindStringSubmatch(text)
	return m != nil && strings.ReplaceAll(m[1], ".", "=2E") == m[2]
}

func redact(text string) string { return credential.ReplaceAllString(text, "[redacted]") }
