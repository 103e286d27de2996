package process

import (
	"net/http"
	"net/url"
	"slices"
	"sync"

	"github.com/org-runink/runbus/internal/selfguard"
)

// The variables that may have a login in them beside those that are read once: children inherit them.
var (
	proxyEnv     = []string{"HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"}
	telemetryEnv = []string{"OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"}
)

// HideLogins takes the logins of proxies and of a collector of traces, an enrolment token and a ticket out of what the kernel shows of this
// process's environment, at the first call; all calls return what came of it. The process and its children still have them. Call it first in
// main: a mistake in the arguments is written before anything reads them. Who reads them says if it failed.
var HideLogins = sync.OnceValue(func() error {
	keepProxy()
	return selfguard.HideEnv(slices.Concat(proxyEnv, telemetryEnv, []string{"RUNNER_ENROLL_TOKEN", "CORE_RUNNER_TICKET"})...)
})

// ForgetProxyAnd takes variables out of the environment for good, and with them those of proxies, which requests go on to use.
func ForgetProxyAnd(names ...string) error {
	keepProxy()
	return selfguard.ForgetEnv(append(names, proxyEnv...)...)
}

// keepProxy has the standard library read the proxy's variables, which it does once: spans and calls may have to go out by it later.
func keepProxy() {
	_, _ = http.ProxyFromEnvironment(&http.Request{URL: &url.URL{Scheme: "https", Host: "invalid"}}) // what is wrong with them says who uses them
}
