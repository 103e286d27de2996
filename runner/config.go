package runner

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"go.opentelemetry.io/otel/trace"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/runner/source/all"
	"github.com/org-runink/runbus/runner/tunnel"
	"github.com/org-runink/runbus/schemas"
)

// Defaults of the knobs (SPEC, "Interfaces that are fixed now").
const (
	DefaultConcurrency = 4
	DefaultDrainGrace  = 10 * time.Minute
	DefaultStateDir    = "/var/lib/core-runner"
	DefaultPort        = "4222"
	DefaultListen      = ":7443"
)

// The values of Config.Journal beside the empty one.
const (
	JournalOn  = "on"
	JournalOff = "off"
)

// Config is what a runner needs to know. ConfigFromEnv fills it; every field can also be set by hand.
type Config struct {
	// Addrs are the control plane's addresses, each `host:port` or a URL (tls, nats, wss, ws). None: the control plane dials this
	// runner, at Listen.
	Addrs []string
	// Lifeline is the file descriptor on which a managed runner's control plane, which started it, hands it its links (SPEC M1,
	// `local`). Zero, for every other runner, means none. With it nothing says who this runner is but the links.
	Lifeline int
	// Listen is where a runner that is dialled listens, host:port (SPEC C1). Empty means DefaultListen.
	Listen string
	// Ticket enrols a runner that is dialled, once (SPEC C3). Nil for one that is enrolled already.
	Ticket *schemas.Ticket
	// TicketGone is why there is no ticket although one was announced. Nil: none was. A runner whose enrolment has begun goes on.
	TicketGone error
	// Token is the service-account token. A person's session token is taken too, so that the control plane can refuse it
	// in its own words (SPEC E5).
	Token string
	// ID is the runner's id. Empty: the one kept in StateDir, generated at the first start (SPEC E1).
	ID string
	// Name and Version are for display. Empty: the host's name, and the build's version.
	Name, Version string
	// The fields from here to Proxy are for a runner that dials.

	// TLS is off only with RUNNER_ENROLL_TLS=false.
	TLS bool
	// CA is a PEM file trusted beside the system roots; may be empty.
	CA string
	// Proxy is how the control plane is reached through an HTTP proxy. Sources never use it.
	Proxy tunnel.Settings
	// StateDir is where a generated id, the journal and the counts of a policy's budgets are kept. Empty means DefaultStateDir.
	StateDir string
	// FileRoots are the folders that the file and sqlite sources may read. Empty: nowhere.
	FileRoots []string
	// Policy is the file of the local policy (runner/policy). Empty: everything but cloud metadata is allowed.
	Policy string
	// Journal is `on`, `off`, or empty: on if StateDir can be written. Its folder is `journal` in StateDir. With a journal that can't
	// be written the runner refuses work.
	Journal string
	// Concurrency is how many works run at once (SPEC D6). Zero means DefaultConcurrency.
	Concurrency int
	// DrainGrace is how long running works may go on after Drain (SPEC D14). Zero means DefaultDrainGrace; RUNNER_DRAIN_GRACE=0s
	// means none.
	DrainGrace time.Duration
	// OnEnrolled, if set, is called after each enrolment, once the runner can be dispatched to.
	OnEnrolled func(Enrolled)
	// Connectors finds the connector of a source kind. Nil means all.Find: those that ship. A measurement brings its own.
	Connectors func(kind string) (source.Connector, error)
	// FitProcessors has the process use one processor while that is enough for its works, by GOMAXPROCS, unless the environment sets that.
	// It is for a process that is a runner and nothing else.
	FitProcessors bool
	// Step is told of each step that changes the state folder of a runner that is dialled, for tests that end the process there. May be
	// nil.
	Step func(name string)
	// Tracing makes the spans of works. Nil: none are made.
	Tracing trace.TracerProvider
	// Log is where the runner logs. Nil means slog.Default.
	Log *slog.Logger
}

// Enrolled is what a runner knows after its hello was accepted.
type Enrolled struct {
	RunnerID string `json:"runnerId"` // plain
	TenantID string `json:"tenantId"`
	Session  string `json:"session"`
	PID      int    `json:"pid"`
}

// ConfigFromEnv reads the RUNNER_… variables through getenv (os.Getenv), and the file of the token if RUNNER_ENROLL_TOKEN_FILE
// names one. Its errors are *ExitError of ExitConfig and say which variable is wrong.
func ConfigFromEnv(getenv func(string) string) (Config, error) {
	c := Config{
		Token:    getenv("RUNNER_ENROLL_TOKEN"),
		ID:       getenv("RUNNER_ID"),
		Listen:   getenv("CORE_RUNNER_LISTEN"),
		Name:     getenv("RUNNER_NAME"),
		Version:  getenv("RUNNER_VERSION"),
		CA:       getenv("RUNNER_ENROLL_CA"),
		StateDir: getenv("CORE_RUNNER_STATE_DIR"),
		Policy:   getenv("RUNNER_POLICY"),
		Journal:  getenv("RUNNER_JOURNAL"),
		Proxy:    tunnel.FromEnv(getenv),
		TLS:      true,
	}
	for addr := range strings.SplitSeq(getenv("RUNNER_ENROLL_ADDR"), ",") {
		if addr = strings.TrimSpace(addr); addr != "" {
			c.Addrs = append(c.Addrs, addr)
		}
	}
	for root := range strings.SplitSeq(getenv("RUNNER_FILE_ROOTS"), string(os.PathListSeparator)) {
		if root != "" {
			c.FileRoots = append(c.FileRoots, root)
		}
	}
	if file := getenv("RUNNER_ENROLL_TOKEN_FILE"); file != "" {
		if c.Token != "" {
			return Config{}, configError("RUNNER_ENROLL_TOKEN and RUNNER_ENROLL_TOKEN_FILE are both set: drop one of them")
		}
		token, err := tokenFromFile(file)
		if err != nil {
			return Config{}, configError("RUNNER_ENROLL_TOKEN_FILE: %w", err)
		}
		c.Token = token
	}
	if v := getenv("RUNNER_ENROLL_TLS"); v != "" {
		on, err := strconv.ParseBool(v)
		if err != nil {
			return Config{}, configError("RUNNER_ENROLL_TLS is %q: use true or false", v)
		}
		c.TLS = on
	}
	if v := getenv("RUNNER_LIFELINE"); v != "" {
		fd, err := strconv.Atoi(v)
		if err != nil || fd < 3 || fd > 1<<20 {
			return Config{}, configError("RUNNER_LIFELINE is %q: it is set by the control plane that starts its managed runner, and by nobody else", v)
		}
		c.Lifeline = fd
	}
	if v := getenv("RUNNER_CONCURRENCY"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 || n > 10_000 {
			return Config{}, configError("RUNNER_CONCURRENCY is %q: use a number from 1 to 10000", v)
		}
		c.Concurrency = n
	}
	if v := getenv("RUNNER_DRAIN_GRACE"); v != "" {
		d, err := time.ParseDuration(v)
		if err != nil || d < 0 {
			return Config{}, configError("RUNNER_DRAIN_GRACE is %q: use a duration such as 10m or 90s", v)
		}
		c.DrainGrace = max(d, 1) // 0s: no grace
	}
	return c, nil
}

// prepare fills the defaults and checks everything that can be checked without a network.
func (c *Config) prepare() (cred proof, tenant string, err error) {
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if err := c.oneWay(); err != nil {
		return nil, "", err
	}
	if c.Concurrency == 0 {
		c.Concurrency = DefaultConcurrency
	}
	if c.Connectors == nil {
		c.Connectors = all.Find
	}
	if c.DrainGrace == 0 {
		c.DrainGrace = DefaultDrainGrace
	}
	if c.StateDir == "" {
		c.StateDir = DefaultStateDir
	}
	if c.Version == "" {
		c.Version = BuildVersion()
	}
	for i, addr := range c.Addrs {
		u, err := c.serverURL(addr)
		if err != nil {
			return nil, "", err
		}
		c.Addrs[i] = u
	}
	if err := c.plain(); err != nil {
		return nil, "", err
	}
	if len(c.Addrs) > 0 {
		if cred, tenant, err = c.prepareOutbound(); err != nil {
			return nil, "", err
		}
	}
	return cred, tenant, c.plain() // the name may be the host's now
}

// plain checks what hangs on nothing else.
func (c *Config) plain() error {
	if c.Journal != "" && c.Journal != JournalOn && c.Journal != JournalOff {
		return configError("RUNNER_JOURNAL is %q: use on or off", c.Journal)
	}
	if err := displayText("RUNNER_NAME", c.Name, 128); err != nil {
		return err
	}
	return displayText("RUNNER_VERSION", c.Version, 64)
}

// oneWay refuses what mixes a runner that dials with one that is dialled.
func (c *Config) oneWay() error {
	switch dials := len(c.Addrs) > 0; {
	case c.Lifeline > 0:
		if dials || c.Ticket != nil || c.TicketGone != nil || c.Token != "" || c.ID != "" || c.Listen != "" {
			return configError("RUNNER_LIFELINE is set: the control plane that started this runner says who it is, so that RUNNER_ENROLL_ADDR, a token, a ticket, RUNNER_ID and CORE_RUNNER_LISTEN have no place")
		}
		if c.Name == "" {
			c.Name = schemas.ConsoleRunner
		}
		return nil
	case dials && (c.Ticket != nil || c.TicketGone != nil):
		return configError("RUNNER_ENROLL_ADDR and a ticket are both set: a runner dials its control plane with a service-account token, or it has a ticket and is dialled. Drop one of them")
	case dials && c.Token == "":
		return &ExitError{Code: ExitConfig, Err: schemas.ErrTokenMissing()}
	case dials && c.Listen != "":
		return configError("RUNNER_ENROLL_ADDR and CORE_RUNNER_LISTEN (--listen) are both set: this runner would dial its control plane, or be dialled. Drop one of them")
	case !dials && c.Token != "":
		return configError("no control plane to enrol at: set RUNNER_ENROLL_ADDR to its host:port. (Without RUNNER_ENROLL_TOKEN this runner would listen for its control plane)")
	case !dials && c.ID != "":
		return configError("RUNNER_ID is set, and a runner that is dialled gets its id with its ticket: drop it, or set RUNNER_ENROLL_ADDR for a runner that dials")
	case !dials && c.Listen == "":
		c.Listen = DefaultListen
	}
	if c.Listen != "" {
		if _, port, err := net.SplitHostPort(c.Listen); err != nil || !validPort(port) {
			return configError("CORE_RUNNER_LISTEN (--listen): %q is not host:port or :port", c.Listen)
		}
	}
	return nil
}

// validPort accepts 0, a free one, too.
func validPort(s string) bool {
	_, err := strconv.ParseUint(s, 10, 16)
	return err == nil
}

// prepareOutbound reads the credential of a runner that dials, and settles its id and name.
func (c *Config) prepareOutbound() (proof, string, error) {
	cred, err := parseCredential(c.Token)
	if err != nil {
		return nil, "", &ExitError{Code: ExitConfig, Err: fmt.Errorf("RUNNER_ENROLL_TOKEN: %w", err)}
	}
	c.Token = ""
	if c.ID == "" {
		if c.ID, err = keptID(c.StateDir); err != nil {
			return nil, "", err
		}
	}
	if err := outboundID(c.ID); err != nil {
		return nil, "", &ExitError{Code: ExitConfig, Err: err}
	}
	if c.Name == "" {
		if c.Name, err = os.Hostname(); err != nil {
			c.Name = c.ID
		}
	}
	return cred, cred.tenant, nil
}

// outboundID refuses an id that no runner that dials may have.
func outboundID(id string) error {
	if err := schemas.ValidRunnerID(id); err != nil {
		return fmt.Errorf("RUNNER_ID: %w", err)
	}
	if id == schemas.ConsoleRunner {
		return fmt.Errorf("RUNNER_ID: %q is reserved for the managed runner: choose another id", id)
	}
	if schemas.IsDialledID(id) {
		return fmt.Errorf("RUNNER_ID: %w", schemas.ErrDialledID(id))
	}
	return nil
}

// displayText refuses what a control plane would refuse in a hello.
func displayText(variable, s string, most int) error {
	if len(s) > most {
		return configError("%s has %d bytes: at most %d are allowed", variable, len(s), most)
	}
	if !utf8.ValidString(s) || strings.ContainsFunc(s, unicode.IsControl) {
		return configError("%s is not plain text", variable)
	}
	return nil
}

// serverURL turns `host:port` into the URL that nats.go dials. A scheme that contradicts RUNNER_ENROLL_TLS is refused, so
// that nobody sends in the clear by a slip.
func (c *Config) serverURL(addr string) (string, error) {
	// First of all, so that no text shows a credential that is in the wrong place.
	if strings.Contains(addr, "@") || strings.Contains(addr, schemas.ServiceTokenPrefix) || strings.Contains(addr, schemas.SessionTokenPrefix) {
		return "", configError("RUNNER_ENROLL_ADDR has a user or a token in it: the credential belongs into RUNNER_ENROLL_TOKEN")
	}
	if !strings.Contains(addr, "://") {
		if c.TLS {
			addr = "tls://" + addr
		} else {
			addr = "nats://" + addr
		}
	}
	u, err := url.Parse(addr)
	// An IPv6 address without brackets would be cut at some colon.
	if err != nil || u.Hostname() == "" || strings.Contains(strings.TrimSuffix(u.Host, ":"+u.Port()), ":") && u.Host[0] != '[' {
		return "", configError("RUNNER_ENROLL_ADDR: %q is not host:port or a tls, nats, wss or ws URL", addr)
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return "", configError("RUNNER_ENROLL_ADDR: %q has a port that is not 1-65535", addr)
		}
	}
	webSocket := u.Scheme == "wss" || u.Scheme == "ws"
	if u.RawQuery != "" || u.Fragment != "" || !webSocket && strings.Trim(u.Path, "/") != "" {
		return "", configError("RUNNER_ENROLL_ADDR: %q has more than a host and a port", addr)
	}
	switch u.Scheme {
	case "tls", "wss":
		if !c.TLS {
			return "", configError("RUNNER_ENROLL_ADDR says %s:// and RUNNER_ENROLL_TLS says false: drop one of them", u.Scheme)
		}
	case "ws":
		if c.TLS {
			return "", configError("RUNNER_ENROLL_ADDR says ws://, which is plaintext: use wss://, or set RUNNER_ENROLL_TLS=false")
		}
	case "nats":
		if c.TLS {
			u.Scheme = "tls"
		}
	default:
		return "", configError("RUNNER_ENROLL_ADDR: unknown scheme %q: use host:port, tls, wss, nats or ws", u.Scheme)
	}
	if !webSocket {
		u.Path = ""
	}
	if u.Port() == "" {
		port := map[string]string{"wss": "443", "ws": "80"}[u.Scheme]
		if port == "" {
			port = DefaultPort
		}
		u.Host = net.JoinHostPort(u.Hostname(), port)
	}
	return u.String(), nil
}

// tlsConfig trusts the system roots and the CA file; TLS 1.3 only. With TLS off it refuses every handshake: the server
// wants TLS then, and the error says so. It is nil for plaintext WebSocket, where nats.go would shake hands if there were one.
func (c *Config) tlsConfig() (*tls.Config, error) {
	if len(c.Addrs) == 0 {
		return nil, nil // a link brings its own
	}
	if !c.TLS {
		if strings.HasPrefix(c.Addrs[0], "ws://") {
			return nil, nil
		}
		return &tls.Config{
			MinVersion:         tls.VersionTLS13,
			InsecureSkipVerify: true, //nolint:gosec // VerifyConnection below refuses every connection
			VerifyConnection: func(tls.ConnectionState) error {
				return errors.New("the control plane requires TLS, and RUNNER_ENROLL_TLS=false turns it off here: remove that setting")
			},
		}, nil
	}
	t := &tls.Config{MinVersion: tls.VersionTLS13}
	var err error
	t.RootCAs, err = c.roots()
	return t, err
}

// keptID is the id in the state folder, made at the first start.
func keptID(dir string) (string, error) {
	file := filepath.Join(dir, "runner-id")
	const hint = "set RUNNER_ID, or CORE_RUNNER_STATE_DIR (--state-dir) to a folder this process can write"
	id, err := readID(file)
	if errors.Is(err, os.ErrNotExist) {
		if err := makeID(dir, file); err != nil {
			return "", configError("can't keep a generated runner id: %v: %s", err, hint)
		}
		id, err = readID(file)
	}
	if err != nil {
		return "", configError("can't read the runner's id: %v: %s", err, hint)
	}
	return id, nil
}

func readID(file string) (string, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	id := strings.TrimSpace(string(b))
	if err := schemas.ValidRunnerID(id); err != nil {
		return "", fmt.Errorf("%s is damaged: it holds no runner id", file)
	}
	return id, nil
}

// makeID writes an id in one step: of several first starts on one folder one makes it, and a crash leaves no empty file.
func makeID(dir, file string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(dir, ".runner-id-*") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) //nolint:errcheck // best effort: a leftover does no harm
	_, err = f.WriteString("runner-" + schemas.NewID()[:12] + "\n")
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Link(f.Name(), file); !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil // the other process's
}

// BuildVersion is the version of this build, `(devel)` when it has none.
func BuildVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(devel)"
}
