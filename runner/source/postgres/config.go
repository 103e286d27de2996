package postgres

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/schemas"
)

// connectWithin bounds the way from the first dial to an authenticated session.
const connectWithin = 20 * time.Second

// target is where to connect and how.
type target struct {
	config *pgconn.Config
}

func (t target) address() string {
	return net.JoinHostPort(t.config.Host, strconv.Itoa(int(t.config.Port)))
}

// base is a configuration in which nothing comes from the environment, the home folder or a service file. pgconn makes
// configurations by ParseConfig alone, which reads them all: so everything that it takes from there is said here.
var base = sync.OnceValues(parseBase)

func parseBase() (*pgconn.Config, error) {
	// The one thing a connection string can't override: a service makes pgconn read its file.
	if service, set := os.LookupEnv("PGSERVICE"); set {
		if err := os.Unsetenv("PGSERVICE"); err != nil {
			return nil, err
		}
		defer os.Setenv("PGSERVICE", service) //nolint:errcheck // it was set before
	}
	config, err := pgconn.ParseConfig("host=localhost port=5432 user=nobody database=nothing password=none passfile='' connect_timeout=0 " +
		"sslmode=disable sslcert='' sslkey='' sslrootcert='' sslpassword='' sslcertmode=allow sslsni=1 sslnegotiation=postgres " +
		"target_session_attrs=any min_protocol_version=3.0 max_protocol_version=3.0 channel_binding=prefer require_auth=''")
	if err != nil {
		return nil, fmt.Errorf("postgres: base configuration: %w", err)
	}
	config.Password, config.ConnectTimeout = "", 0
	config.RuntimeParams = nil
	config.KerberosSpn, config.KerberosSrvName = "", ""
	return config, nil
}

func newConfig(v *source.Values, dial func(ctx context.Context, network, addr string) (net.Conn, error)) (target, error) {
	if dial == nil {
		return target{}, schemas.Errorf(schemas.CodeFailed, "this runner makes no connections")
	}
	parsed, err := base()
	if err != nil {
		return target{}, err
	}
	tlsConfig, verified, err := newTLS(v)
	if err != nil {
		return target{}, err
	}
	c := parsed.Copy()
	c.Host, c.Port = strings.Trim(v.Text("host"), "[]"), uint16(v.Int("port"))
	c.Database, c.User, c.Password = v.Text("database"), v.Text("username"), v.Secret("password")
	c.TLSConfig, c.Fallbacks = tlsConfig, nil
	// Names of parameters that a connection pooler in between lets through.
	c.RuntimeParams = map[string]string{"client_encoding": "UTF8", "application_name": "runbus"}
	c.DialFunc = dial
	// The hook resolves the name, so that it sees every address it dials.
	c.LookupFunc = func(_ context.Context, host string) ([]string, error) { return []string{host}, nil }
	if !verified && !isLoopback(c.Host) {
		c.RequireAuth = "!password"
	}
	return target{config: c}, nil
}

// newTLS is nil for no TLS; verified tells whether the server has to prove who it is.
func newTLS(v *source.Values) (config *tls.Config, verified bool, err error) {
	host, mode, root := strings.Trim(v.Text("host"), "[]"), v.Text("sslMode"), v.Text("sslRootCert")
	if mode == "" {
		if mode = "verify-full"; isLoopback(host) && root == "" && v.Text("sslCert") == "" {
			mode = "disable"
		}
	}
	if (v.Text("sslCert") == "") != (v.Secret("sslKey") == "") {
		return nil, false, schemas.Errorf(schemas.CodeBadSource, "setting \"sslCert\" and secret \"sslKey\" of source postgres come together")
	}
	if mode == "disable" {
		return nil, false, nil
	}
	config = &tls.Config{ServerName: host, MinVersion: tls.VersionTLS12}
	if root != "" {
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM([]byte(root)) {
			return nil, false, schemas.Errorf(schemas.CodeBadSource, "setting \"sslRootCert\" of source postgres has no PEM certificate in it")
		}
	}
	if v.Text("sslCert") != "" {
		pair, err := tls.X509KeyPair([]byte(v.Text("sslCert")), []byte(v.Secret("sslKey")))
		if err != nil { // its text may quote the key
			return nil, false, schemas.Errorf(schemas.CodeBadSource, "setting \"sslCert\" and secret \"sslKey\" of source postgres are not a PEM certificate and its key")
		}
		config.Certificates = []tls.Certificate{pair}
	}
	switch {
	case mode == "verify-full":
	case mode == "verify-ca", root != "":
		config.InsecureSkipVerify = true // of the name; the chain is verified here
		config.VerifyConnection = func(state tls.ConnectionState) error {
			opts := x509.VerifyOptions{Roots: config.RootCAs, Intermediates: x509.NewCertPool()}
			for _, c := range state.PeerCertificates[1:] {
				opts.Intermediates.AddCert(c)
			}
			_, err := state.PeerCertificates[0].Verify(opts)
			return err
		}
	default:
		config.InsecureSkipVerify = true
		return config, false, nil
	}
	return config, true, nil
}

// isHost takes one name or address: no socket's path, no list, no port.
func isHost(host string) error {
	bare := strings.Trim(host, "[]")
	if net.ParseIP(bare) != nil {
		return nil
	}
	if bare != host || len(host) > 253 || strings.ContainsFunc(host, func(r rune) bool {
		return (r < '0' || r > '9') && (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && r != '.' && r != '-' && r != '_'
	}) {
		return errors.New("must be one host name or IP address (the port is a setting of its own; sockets are not supported)")
	}
	return nil
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return strings.EqualFold(host, "localhost") || ip != nil && ip.IsLoopback()
}

// connectError says why there is no session, without pgconn's list of settings.
func connectError(t target, err error) error {
	var coded *schemas.Error
	if errors.As(err, &coded) { // the dial hook's refusal
		return coded
	}
	var said *pgconn.PgError
	if errors.As(err, &said) {
		return serverError(said.Severity, said.Code, said.Message, said.Hint, 0)
	}
	var unknown *net.DNSError
	if errors.As(err, &unknown) {
		return schemas.Errorf(schemas.CodeSource, "connect to PostgreSQL: %s", unknown.Error()).WithHint("the name is resolved on the runner's machine; check the setting host")
	}
	var outer *pgconn.ConnectError
	if errors.As(err, &outer) {
		err = outer.Unwrap()
	}
	hint := ""
	switch text := err.Error(); {
	case strings.Contains(text, "server refused TLS"):
		hint = "the server has no TLS; sslMode disable does without, in the clear"
	case strings.Contains(text, "require_auth"), strings.Contains(text, "authentication method"):
		hint = "the server asks for the password in the clear; that is sent to a verified server only: sslMode verify-full"
	case strings.Contains(text, "certificate"):
		hint = "the setting sslRootCert takes the certificate of the server's authority"
	case strings.Contains(text, "refused"):
		hint = "nothing listens there; check host and port, from the runner's machine"
	case errors.Is(err, context.DeadlineExceeded):
		hint = "a firewall may be in between; check host and port, from the runner's machine"
	}
	return schemas.Errorf(schemas.CodeSource, "connect to PostgreSQL at %s: %s", t.address(), err).WithHint(hint)
}
