package embedded

import (
	"cmp"
	_ "embed"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"text/template"
	"time"

	"github.com/org-runink/runbus/schemas"
)

// Limits of the server. Those of a connection hold for every client alike.
const (
	MaxPayload       = 1 << 20  // bytes of one message
	MaxControlLine   = 4 << 10  // bytes of one protocol line: the subjects of a PUB or SUB
	MaxSubscriptions = 1000     // of one connection
	MaxPending       = 64 << 20 // bytes that may wait for one connection that reads slowly
	MaxMemoryStore   = 256 << 20
	MaxFileStore     = 32 << 30
)

// Config is what the server is started from.
type Config struct {
	// Name of the server, shown by `nats server list`. Empty means `runbus`.
	Name string
	// StoreDir is JetStream's folder. It is made when missing.
	StoreDir string
	// Listen is the client port, host:port. Port 0 takes a free one.
	Listen string
	// CertFile and KeyFile are the PEM files of the server's certificate; TLS 1.3 only. Needed unless Plaintext.
	CertFile, KeyFile string
	// Plaintext turns TLS off, for both listeners. A WebSocket listener without TLS must be on loopback.
	Plaintext bool
	// WebSocket is the WebSocket listener, host:port. Port 0 takes a free one; empty turns it off.
	WebSocket string
	// AuthTimeout is how long a client may take to be let in, the callout's answer included. Zero means 1.8 s; milliseconds at
	// least.
	AuthTimeout time.Duration
	// Keys of the installation.
	Keys *Keys
	// Log gets the server's own log. Nil means slog.Default().
	Log *slog.Logger
}

// defaultAuthTimeout is less than the 2 s for which clients wait.
const defaultAuthTimeout = 1800 * time.Millisecond

//go:embed accounts.conf.tmpl
var configTemplate string

var configText = template.Must(template.New("accounts.conf").Parse(configTemplate))

// ConfigText is the configuration of the server as text that a stock nats-server reads as well. It has public keys only.
// What is wrong with c is an error of CodeInvalid.
func ConfigText(c Config) (string, error) {
	if err := c.check(); err != nil {
		return "", err
	}
	xkey, err := c.Keys.XKey().PublicKey()
	if err != nil {
		return "", fmt.Errorf("public key of the callout: %w", err)
	}
	issuer, err := c.Keys.Issuer().PublicKey()
	if err != nil {
		return "", fmt.Errorf("public key of the issuer: %w", err)
	}
	var users []string
	for _, u := range Users() {
		users = append(users, strconv.Quote(c.Keys.Public(u)))
	}
	v := values{
		Name: quoted(c.name()), Listen: quoted(portOf(c.Listen)), StoreDir: quoted(c.StoreDir),
		TLS: !c.Plaintext, CertFile: quoted(c.CertFile), KeyFile: quoted(c.KeyFile),
		WebSocket: c.WebSocket != "", WebSocketListen: quoted(portOf(c.WebSocket)),
		MaxPayload: MaxPayload, MaxControlLine: MaxControlLine, MaxSubscriptions: MaxSubscriptions, MaxPending: MaxPending,
		MaxMemory: MaxMemoryStore, MaxFile: MaxFileStore,
		AuthTimeout: cmp.Or(c.AuthTimeout, defaultAuthTimeout).Seconds(),
		Issuer:      quoted(issuer), XKey: quoted(xkey), AuthUsers: strings.Join(users, ", "), keys: c.Keys,
	}
	var text strings.Builder
	if err := configText.Execute(&text, v); err != nil {
		return "", fmt.Errorf("fill in the server's configuration: %w", err)
	}
	return text.String(), nil
}

// values fill in the template.
type values struct {
	Name, Listen, StoreDir                       string
	TLS                                          bool
	CertFile, KeyFile                            string
	WebSocket                                    bool
	WebSocketListen                              string
	MaxPayload, MaxControlLine, MaxSubscriptions int
	MaxPending, MaxMemory, MaxFile               int64
	AuthTimeout                                  float64 // seconds
	Issuer, XKey, AuthUsers                      string
	keys                                         *Keys
}

// User is the public key of a configured user, quoted.
func (v values) User(name string) (string, error) {
	public := v.keys.Public(User(name))
	if public == "" {
		return "", fmt.Errorf("no user %q", name)
	}
	return quoted(public), nil
}

func (c Config) name() string {
	if c.Name == "" {
		return "runbus"
	}
	return c.Name
}

// check refuses a configuration that the server would refuse later, or should have refused.
func (c Config) check() error {
	if c.Keys == nil {
		return schemas.Errorf(schemas.CodeInvalid, "the server's keys are missing")
	}
	if c.StoreDir == "" {
		return schemas.Errorf(schemas.CodeInvalid, "the server's data folder is missing")
	}
	for what, s := range map[string]string{"server name": c.Name, "data folder": c.StoreDir, "certificate file": c.CertFile, "key file": c.KeyFile} {
		if strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return schemas.Errorf(schemas.CodeInvalid, "the %s %q has a control character", what, s)
		}
	}
	if strings.ContainsAny(c.Name, " \t") {
		return schemas.Errorf(schemas.CodeInvalid, "the server name %q has a space", c.Name)
	}
	if err := checkAddress(c.Listen); err != nil {
		return err
	}
	if !c.Plaintext && (c.CertFile == "" || c.KeyFile == "") {
		return schemas.Errorf(schemas.CodeInvalid, "the server has no certificate: name one, or ask for plaintext")
	}
	if c.WebSocket == "" {
		return nil
	}
	if err := checkAddress(c.WebSocket); err != nil {
		return err
	}
	if c.Plaintext && !isLoopback(c.WebSocket) {
		return schemas.Errorf(schemas.CodeInvalid, "the WebSocket address %s is not on loopback: without TLS it must be", c.WebSocket)
	}
	return nil
}

func checkAddress(addr string) error {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return schemas.Errorf(schemas.CodeInvalid, "the address %q is not host:port", addr)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return schemas.Errorf(schemas.CodeInvalid, "the address %q has no port of 0-65535", addr)
	}
	if strings.ContainsAny(host, "\"\\ \t\r\n") {
		return schemas.Errorf(schemas.CodeInvalid, "the address %q has no valid host", addr)
	}
	return nil
}

func isLoopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// portOf writes port 0 as the server does: -1 is "a free one", 0 would be the default port.
func portOf(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if err == nil && port == "0" {
		return net.JoinHostPort(host, "-1")
	}
	return addr
}

// quoted writes s as a string of the configuration language, whose escapes are fewer than Go's.
func quoted(s string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(s) + `"`
}
