package dispatch

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
)

// metrics are the dispatcher's figures. No label holds a tenant, a runner or a dispatch.
type metrics struct {
	ended    *prometheus.CounterVec // outcome, code
	inFlight prometheus.Gauge
	duration *prometheus.HistogramVec // outcome
	rows     prometheus.Counter
	bytes    prometheus.Counter
	again    prometheus.Counter

	registerer prometheus.Registerer
	registered []prometheus.Collector
}

func newMetrics(registerer prometheus.Registerer, receivers *bus.Receivers) (*metrics, error) {
	counter := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Namespace: "runbus", Subsystem: "dispatch", Name: name, Help: help}
	}
	m := &metrics{
		ended: prometheus.NewCounterVec(counter("ended_total", "Dispatches that ended, by outcome and error code."), []string{"outcome", "code"}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: "runbus", Subsystem: "dispatch", Name: "in_flight", Help: "Dispatches that run on this replica.",
		}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "runbus", Subsystem: "dispatch", Name: "duration_seconds", Help: "From the request to the end, by outcome.",
			Buckets: prometheus.ExponentialBuckets(0.005, 3, 12),
		}, []string{"outcome"}),
		rows:       prometheus.NewCounter(counter("rows_total", "Rows that runners returned.")),
		bytes:      prometheus.NewCounter(counter("bytes_total", "Arrow bytes before compression that runners returned.")),
		again:      prometheus.NewCounter(counter("published_again_total", "Assignments that were published again after nobody received them.")),
		registerer: registerer,
	}
	if registerer == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.ended, m.inFlight, m.duration, m.rows, m.bytes, m.again, droppedCollector{receivers}} {
		if err := registerer.Register(c); err != nil {
			m.close()
			return nil, err
		}
		m.registered = append(m.registered, c)
	}
	return m, nil
}

// count adds one ended run.
func (m *metrics) count(run *run, o Outcome, took time.Duration) {
	code := "ok"
	if o.Err != nil {
		code = string(o.Err.Code)
	}
	m.ended.WithLabelValues(o.Code, code).Inc()
	m.duration.WithLabelValues(o.Code).Observe(took.Seconds())
	run.mu.Lock()
	defer run.mu.Unlock()
	m.rows.Add(float64(max(run.rows, 0)))
	m.bytes.Add(float64(max(run.bytes, 0)))
}

// close takes the collectors out of the registerer.
func (m *metrics) close() {
	for _, c := range m.registered {
		m.registerer.Unregister(c)
	}
}

var droppedDesc = prometheus.NewDesc("runbus_dispatch_results_dropped_total",
	"Messages of runners that belong to no dispatch that waits for them, by reason (SPEC D5).", []string{"reason"}, nil)

// droppedCollector reads the counts that the result streams keep.
type droppedCollector struct{ receivers *bus.Receivers }

func (c droppedCollector) Describe(ch chan<- *prometheus.Desc) { ch <- droppedDesc }

func (c droppedCollector) Collect(ch chan<- prometheus.Metric) {
	for reason, n := range c.receivers.Dropped() {
		ch <- prometheus.MustNewConstMetric(droppedDesc, prometheus.CounterValue, float64(n), string(reason))
	}
}

// known are the codes of this platform, which may be a label; nothing else of a runner's may.
var known = map[string]bool{
	string(schemas.CodeNoRunner):       true,
	string(schemas.CodeRunnerUnknown):  true,
	string(schemas.CodeRunnerRevoked):  true,
	string(schemas.CodeRunnerOffline):  true,
	string(schemas.CodeRunnerBusy):     true,
	string(schemas.CodeFailed):         true,
	string(schemas.CodeCancelled):      true,
	string(schemas.CodeDeadline):       true,
	string(schemas.CodeRunnerLost):     true,
	string(schemas.CodeOutcomeUnknown): true,
	string(schemas.CodeInvalid):        true,
	string(schemas.CodeUnauthorized):   true,
	string(schemas.CodeForbidden):      true,
	string(schemas.CodeNotFound):       true,
	string(schemas.CodeConflict):       true,
	string(schemas.CodeLimit):          true,
	string(schemas.CodeUnavailable):    true,
	string(schemas.CodeHelloFirst):     true,
	string(schemas.CodeReplaced):       true,
	string(schemas.CodeReadOnly):       true,
	string(schemas.CodeSource):         true,
	string(schemas.CodeBadSource):      true,
	string(schemas.CodeForbiddenHop):   true,
}
