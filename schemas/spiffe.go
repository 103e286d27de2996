package schemas

import (
	"crypto/rand"
	"encoding/base32"
	"net/url"
	"strings"
)

// TrustDomain is the SPIFFE trust domain of the runner CA (SPEC C5).
const TrustDomain = "core.runink"

const (
	dialledPrefix   = "r-"
	dialledLength   = len(dialledPrefix) + 26
	runnerPath      = "/runner/"
	controlPath     = "/control-plane"
	base32LowerCase = "abcdefghijklmnopqrstuvwxyz234567"
)

// NewRunnerID is the id of a new dialled runner: `r-` and 128 random bits. IsDialledID knows it.
func NewRunnerID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails, crypto/rand
	return dialledPrefix + base32.NewEncoding(base32LowerCase).WithPadding(base32.NoPadding).EncodeToString(b[:])
}

// IsDialledID reports whether id has the shape of a dialled runner's id. An outbound runner may not take such a one, so that
// an id belongs to one kind.
func IsDialledID(id string) bool {
	if len(id) != dialledLength || id[:len(dialledPrefix)] != dialledPrefix {
		return false
	}
	for i := len(dialledPrefix); i < len(id); i++ {
		if strings.IndexByte(base32LowerCase, id[i]) < 0 {
			return false
		}
	}
	return true
}

// RunnerURI is the SPIFFE id in a dialled runner's certificate, `spiffe://core.runink/runner/<id>`.
func RunnerURI(id string) *url.URL {
	return &url.URL{Scheme: "spiffe", Host: TrustDomain, Path: runnerPath + id}
}

// ControlPlaneURI is the SPIFFE id in the control plane's client certificate.
func ControlPlaneURI() *url.URL {
	return &url.URL{Scheme: "spiffe", Host: TrustDomain, Path: controlPath}
}

// RunnerOfURI is the id in a RunnerURI of a dialled runner. Any other URI is an error of CodeInvalid.
func RunnerOfURI(u *url.URL) (id string, err error) {
	if u != nil {
		// What RunnerURI would not write is refused as a whole: users, ports, escapes, queries.
		if id := strings.TrimPrefix(u.Path, runnerPath); IsDialledID(id) && *u == *RunnerURI(id) {
			return id, nil
		}
	}
	return "", Errorf(CodeInvalid, "the URI is not spiffe://%s%s<id>", TrustDomain, runnerPath)
}

// IsControlPlaneURI reports whether u is ControlPlaneURI and nothing more.
func IsControlPlaneURI(u *url.URL) bool { return u != nil && *u == *ControlPlaneURI() }
