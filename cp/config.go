package cp

import (
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	oteltrace "go.opentelemetry.io/otel/trace"

	"github.com/org-runink/runbus/cp/egress"
	"github.com/org-runink/runbus/cp/enrol"
	"github.com/org-runink/runbus/schemas"
)

// Defaults of a control plane.
const (
	DefaultHTTP    = "127.0.0.1:7100"
	DefaultNATS    = "127.0.0.1:4222"
	DefaultDataDir = "/var/lib/runbus"
	// LocalTenant and LocalAdmin are what the embedded default starts with: a tenant and its first ORG_ADMIN.
	LocalTenant = "local"
	LocalAdmin  = "owner"

	defaultTimeout   = 10 * time.Minute
	defaultGrace     = 15 * time.Second
	defaultStopGrace = 30 * time.Second
)

// Config is what a control plane needs to know. The zero value of a field means its default.
type Config struct {
	// DataDir holds keys, certificates, tokens and JetStream's files, mode 0700. One control plane at a time uses it.
	DataDir string
	// HTTP, NATS and WebSocket are the listeners, host:port; port 0 takes a free one. WebSocket empty: off.
	HTTP, NATS, WebSocket string
	// CertFile and KeyFile are the certificate of all listeners that use TLS. Empty: one of a local CA in DataDir, for loopback
	// and Hosts.
	CertFile, KeyFile string
	Hosts             []string
	// HTTPTLS serves the API with that certificate. Beyond loopback it must be on, or BehindProxy.
	HTTPTLS     bool
	BehindProxy bool
	// PlaintextNATS turns TLS off on the client port and the WebSocket listener.
	PlaintextNATS bool
	// DispatchTimeout is the default and the ceiling of a fetch's time (SPEC D4): 10m.
	DispatchTimeout time.Duration
	// Grace is how long running works outlive a lost link (SPEC D13): 15s.
	Grace time.Duration
	// StopGrace is how long running fetches may go on while the control plane stops: 30s.
	StopGrace time.Duration
	// Isolation is REQUIRE_RUNNER_ISOLATION (SPEC D10).
	Isolation bool
	// RunnerCADir is CORE_RUNNER_CA_DIR: where the runner CA is, minted there once (SPEC C1). Empty: `runner-ca` in DataDir.
	RunnerCADir string
	// LeafLife is CORE_RUNNER_LEAF_LIFE: how long the certificate of a dialled runner lives (SPEC C5): 24h, from enrol.MinLeafLife to
	// enrol.MaxLeafLife.
	LeafLife time.Duration
	// RunnerAdmins is CORE_RUNNER_ADMINS: who may change dialled runners (SPEC R6), `name` or `tenant/name`. Empty: everybody who
	// is signed in but a READER.
	RunnerAdmins []string
	// DialAllow and DialDeny are CORE_RUNNER_DIAL_ALLOW and CORE_RUNNER_DIAL_DENY: where runners are dialled (egress.Rules). Empty: no
	// such list.
	DialAllow, DialDeny []egress.Entry
	// ManagedEndpoint is where the managed runner is (SPEC M1), and stands in the role text (SPEC E2): an address, ManagedLocal or
	// ManagedNone. Managed is for ManagedLocal.
	ManagedEndpoint string
	Managed         ManagedConfig
	Version         string
	// Tracing makes the spans of dispatches. Nil: none are made, and a caller's trace context goes on to the runner as it came.
	Tracing oteltrace.TracerProvider
	// Step is told of each step of the enrolments and renewals of dialled runners, for tests that end the process there. May be nil.
	Step func(name string)
	Log  *slog.Logger // nil: slog.Default()
}

// ConfigFromEnv reads the variables of the control plane through getenv (os.Getenv). An error says which variable is wrong.
func ConfigFromEnv(getenv func(string) string) (Config, error) {
	c := Config{
		DataDir: getenv("RUNBUS_DATA_DIR"), HTTP: getenv("RUNBUS_HTTP"), NATS: getenv("RUNBUS_NATS"), WebSocket: getenv("RUNBUS_WEBSOCKET"),
		CertFile: getenv("RUNBUS_TLS_CERT"), KeyFile: getenv("RUNBUS_TLS_KEY"),
		ManagedEndpoint: getenv("MANAGED_RUNNER_ENDPOINT"), RunnerCADir: getenv("CORE_RUNNER_CA_DIR"),
	}
	var err error
	if c.Managed, err = managedFromEnv(getenv); err != nil {
		return Config{}, err
	}
	for host := range strings.SplitSeq(getenv("RUNBUS_HOSTS"), ",") {
		if host = strings.TrimSpace(host); host != "" {
			c.Hosts = append(c.Hosts, host)
		}
	}
	if v := getenv("CORE_RUNNER_ADMINS"); v != "" {
		var err error
		if c.RunnerAdmins, err = parseAdmins(v); err != nil {
			return Config{}, err
		}
	}
	for name, field := range map[string]*[]egress.Entry{egress.EnvAllow: &c.DialAllow, egress.EnvDeny: &c.DialDeny} {
		var err error
		if *field, err = egress.Parse(name, getenv(name)); err != nil {
			return Config{}, err
		}
	}
	for name, field := range map[string]*time.Duration{
		"DISPATCH_TIMEOUT": &c.DispatchTimeout, "RUNNER_GRACE": &c.Grace, "RUNBUS_STOP_GRACE": &c.StopGrace,
		"CORE_RUNNER_LEAF_LIFE": &c.LeafLife,
	} {
		if v := getenv(name); v != "" {
			d, err := time.ParseDuration(v)
			if err != nil || d <= 0 {
				return Config{}, schemas.Errorf(schemas.CodeInvalid, "%s is %q: use a duration such as 10m or 90s", name, v)
			}
			*field = d
		}
	}
	for name, field := range map[string]*bool{
		"REQUIRE_RUNNER_ISOLATION": &c.Isolation, "RUNBUS_HTTP_TLS": &c.HTTPTLS, "RUNBUS_BEHIND_PROXY": &c.BehindProxy,
		"RUNBUS_NATS_PLAINTEXT": &c.PlaintextNATS,
	} {
		if v := getenv(name); v != "" {
			b, err := strconv.ParseBool(v)
			if err != nil {
				return Config{}, schemas.Errorf(schemas.CodeInvalid, "%s is %q: use true or false", name, v)
			}
			*field = b
		}
	}
	return c, nil
}

// Variables are the names of what ConfigFromEnv reads, sorted.
func Variables() (names []string) {
	_, _ = ConfigFromEnv(func(name string) string { // nothing is set: nothing is wrong
		names = append(names, name)
		return ""
	})
	slices.Sort(names)
	return names
}

// parseAdmins reads CORE_RUNNER_ADMINS. A list that names nobody is refused: it would let everybody in.
func parseAdmins(list string) (admins []string, err error) {
	for entry := range strings.SplitSeq(list, ",") {
		if entry = strings.TrimSpace(entry); entry == "" {
			continue
		}
		tenant, name, qualified := strings.Cut(entry, "/")
		if !qualified {
			name = tenant
		} else if err := schemas.ValidTenant(tenant); err != nil {
			return nil, schemas.Errorf(schemas.CodeInvalid, "CORE_RUNNER_ADMINS: %w", err)
		}
		if err := schemas.ValidName("person's name", name); err != nil {
			return nil, schemas.Errorf(schemas.CodeInvalid, "CORE_RUNNER_ADMINS: %w", err).
				WithHint("list people by name, or as tenant/name, with commas between them")
		}
		admins = append(admins, entry)
	}
	if len(admins) == 0 {
		return nil, schemas.Errorf(schemas.CodeInvalid, "CORE_RUNNER_ADMINS is set and names nobody").
			WithHint("list people by name, or as tenant/name, with commas between them; unset it to let everybody but READERs change runners")
	}
	return admins, nil
}

// prepare fills the defaults and checks what can be checked without touching anything.
func (c *Config) prepare() error {
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if c.Step == nil {
		c.Step = func(string) {}
	}
	for field, fallback := range map[*string]string{
		&c.DataDir: DefaultDataDir, &c.HTTP: DefaultHTTP, &c.NATS: DefaultNATS, &c.ManagedEndpoint: "face-runner:7102", &c.Version: "0.0.0-dev",
	} {
		if *field == "" {
			*field = fallback
		}
	}
	for field, fallback := range map[*time.Duration]time.Duration{
		&c.DispatchTimeout: defaultTimeout, &c.Grace: defaultGrace, &c.StopGrace: defaultStopGrace,
	} {
		if *field == 0 {
			*field = fallback
		}
	}
	if c.LeafLife != 0 && (c.LeafLife < enrol.MinLeafLife || c.LeafLife > enrol.MaxLeafLife) {
		return schemas.Errorf(schemas.CodeInvalid, "CORE_RUNNER_LEAF_LIFE is %s: the certificate of a dialled runner lives from %s to %s", c.LeafLife, enrol.MinLeafLife, enrol.MaxLeafLife).
			WithHint("24h is the default; the shorter it is, the sooner a stolen certificate is worth nothing, and the sooner one of a host that is off has expired")
	}
	if err := validEndpoint(c.ManagedEndpoint); err != nil {
		return err
	}
	if (c.CertFile == "") != (c.KeyFile == "") {
		return schemas.Errorf(schemas.CodeInvalid, "a certificate and its key come together: set both or neither")
	}
	for what, addr := range map[string]string{"HTTP": c.HTTP, "NATS": c.NATS, "WebSocket": c.WebSocket} {
		if addr == "" {
			continue
		}
		if _, _, err := net.SplitHostPort(addr); err != nil {
			return schemas.Errorf(schemas.CodeInvalid, "the %s address %q is not host:port", what, addr)
		}
	}
	if !c.HTTPTLS && !c.BehindProxy && !loopback(c.HTTP) {
		return schemas.Errorf(schemas.CodeInvalid, "HTTP on %s is reachable from outside and would be in the clear", c.HTTP).
			WithHint("serve it with TLS (RUNBUS_HTTP_TLS=true), or say that a proxy with TLS stands in front (RUNBUS_BEHIND_PROXY=true); `runink up` stays on loopback")
	}
	if c.PlaintextNATS && !loopback(c.NATS) {
		c.Log.Warn("NATS is in the clear beyond loopback, as configured", "listen", c.NATS)
	}
	return nil
}

// shared reports whether others than the users of this host reach the control plane.
func (c *Config) shared() bool {
	return c.BehindProxy || !loopback(c.HTTP) || !loopback(c.NATS) || c.WebSocket != "" && !loopback(c.WebSocket)
}

// loopback reports whether addr is reachable from this host only. A name must be localhost: any other may resolve anywhere.
func loopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func (c *Config) scheme() string {
	if c.HTTPTLS {
		return "https"
	}
	return "http"
}

func (c *Config) busURL(addr string) string {
	if c.PlaintextNATS {
		return "nats://" + addr
	}
	return "tls://" + addr
}
