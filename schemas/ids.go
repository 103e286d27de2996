package schemas

import (
	"fmt"
	"strings"
)

// MaxRunnerID is the longest runner id in bytes (SPEC E1).
const MaxRunnerID = 64

// ConsoleRunner is the id of the managed runner. No other runner, key or tenant may take it (SPEC D8, E4).
const ConsoleRunner = "console"

// NoTenant stands in subjects for the tenant of a client that has none: one that showed a person's session token. It is
// never a tenant's name.
const NoTenant = "none"

// RunnerRef names one runner of one tenant.
type RunnerRef struct {
	Tenant string // DNS label
	Runner string // plain id, as in RUNNER_ID
}

// String is the tenant-namespaced id, `<tenant>/<id>` (SPEC E6).
func (r RunnerRef) String() string { return r.Tenant + "/" + r.Runner }

// Valid returns nil if both parts follow their grammar.
func (r RunnerRef) Valid() error {
	if err := ValidTenant(r.Tenant); err != nil {
		return err
	}
	return ValidRunnerID(r.Runner)
}

// ParseRunnerRef reads what String wrote.
func ParseRunnerRef(s string) (RunnerRef, error) {
	tenant, runner, ok := strings.Cut(s, "/")
	if !ok {
		return RunnerRef{}, Errorf(CodeInvalid, "%q is not a runner reference (<tenant>/<id>)", s)
	}
	ref := RunnerRef{Tenant: tenant, Runner: runner}
	return ref, ref.Valid()
}

// ValidRunnerID returns nil for 1–64 of `A–Z a–z 0–9 - _ .` (SPEC E1), else an error of CodeInvalid that says what is wrong. What begins
// like a credential of this platform is no id: ids are logged, audited and shown.
func ValidRunnerID(id string) error {
	if id == "" {
		return Errorf(CodeInvalid, "the runner id is empty: set RUNNER_ID to 1-%d of A-Z a-z 0-9 - _ .", MaxRunnerID)
	}
	if len(id) > MaxRunnerID {
		return Errorf(CodeInvalid, "the runner id has %d characters: at most %d of A-Z a-z 0-9 - _ . are allowed", len(id), MaxRunnerID)
	}
	if IsCredential(id) {
		return Errorf(CodeInvalid, "the runner id looks like a token: ids are shown to everybody")
	}
	for i, c := range id {
		if !isRunnerIDRune(c) {
			return Errorf(CodeInvalid, "the runner id has %q at position %d: only A-Z a-z 0-9 - _ . are allowed", c, i+1)
		}
	}
	return nil
}

func isRunnerIDRune(c rune) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.'
}

// ValidTenant returns nil if s is a DNS label that is not reserved, else an error of CodeInvalid.
func ValidTenant(s string) error {
	if err := validLabel("tenant name", s); err != nil {
		return err
	}
	if reservedNames[s] || s == NoTenant {
		return Errorf(CodeInvalid, "the tenant name %q is reserved", s)
	}
	return nil
}

// ValidName returns nil if s is a DNS label that is not reserved: the grammar of the names of keys and people. The
// reserved ones (SPEC E4) are admin, root, system and console. what names the thing in the error, for example `key name`.
func ValidName(what, s string) error {
	if err := validLabel(what, s); err != nil {
		return err
	}
	if reservedNames[s] {
		return Errorf(CodeInvalid, "the %s %q is reserved", what, s)
	}
	return nil
}

var reservedNames = map[string]bool{"admin": true, "root": true, "system": true, ConsoleRunner: true}

// validLabel checks for an RFC 1123 DNS label in lower case, 1–63 bytes.
func validLabel(what, s string) error {
	if s == "" {
		return Errorf(CodeInvalid, "the %s is empty: use a DNS label (1-63 of a-z 0-9 -)", what)
	}
	if IsCredential(s) {
		return Errorf(CodeInvalid, "the %s looks like a token: names are shown to everybody", what)
	}
	if !isLabel(s) {
		return Errorf(CodeInvalid, "the %s %q is not a DNS label (1-63 of a-z 0-9 -, not starting or ending with -)", what, s)
	}
	return nil
}

func isLabel(s string) bool {
	if len(s) == 0 || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}

// ConnectName is what a runner puts into the name of its NATS connection: `<runner id>/<process nonce>`.
func ConnectName(runnerID, processNonce string) string { return runnerID + "/" + processNonce }

// ParseConnectName reads a ConnectName from an untrusted client. The id follows its grammar and the nonce is 1–64
// letters and digits, else an error of CodeInvalid: it is called before a permission is built from the id.
func ParseConnectName(name string) (runnerID, processNonce string, err error) {
	i := strings.LastIndexByte(name, '/')
	if i < 0 {
		return "", "", Errorf(CodeInvalid, "the connection name %q is not <runner id>/<process nonce>", clip(name))
	}
	runnerID, processNonce = name[:i], name[i+1:]
	if err := ValidRunnerID(runnerID); err != nil {
		return "", "", err
	}
	if !isToken(processNonce) {
		return "", "", Errorf(CodeInvalid, "the process nonce in the connection name is not 1-64 letters and digits")
	}
	return runnerID, processNonce, nil
}

// ValidToken reports whether s can stand in a subject for a session, a replica or a dispatch: 1–64 ASCII letters and digits.
func ValidToken(s string) bool { return isToken(s) }

// isToken reports whether s is a random id as this module makes them: 1–64 ASCII letters and digits.
func isToken(s string) bool {
	if s == "" || len(s) > 64 {
		return false
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') {
			return false
		}
	}
	return true
}

// clip shortens foreign text for an error message.
func clip(s string) string {
	const most = 80
	if len(s) <= most {
		return s
	}
	return fmt.Sprintf("%s… (%d bytes)", s[:most], len(s))
}
