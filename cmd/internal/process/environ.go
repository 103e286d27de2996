package process

import (
	"net/http"
	"net/url"
	"slices"

	"github.com/org-runink/runbus/internal/selfguard"
)

// The variables that may have a login in them beside those that are read once: children inherit them.
var (
	proxyEnv     = []string{"HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"}
	telemetryEnv = []string{"OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"}
)

// HideLogins takes the logins of proxies and of a collector of traces, and these variables, out of what the kernel shows of this process's
// environment. It and its children still have them. Call it before anything is written: a mistake in the arguments is, too.
func HideLogins(names ...string) error {
	keepProxy()
	return selfguard.HideEnv(slices.Concat(names, proxyEnv, telemetryEnv)...)
}

// ForgetProxyAnd takes variables out of the environment for good, and with them those of proxies, which requests go on to use.
func ForgetProxyAnd(names ...string) error {
	keepProxy()
	return selfguard.ForgetEnv(append(names, proxyEnv...)...)
}

// keepProxy has the standard library read the proxy's variables, which it does once: spans and calls may have to go out by it later.
func keepProxy() {
	_, _ = http.ProxyFromEnvironment(&http.Request{URL: &url.URL{Scheme: "https", Host: "invalid"}}) // what is wrong with them says who uses them
}
