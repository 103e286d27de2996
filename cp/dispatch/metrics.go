package dispatch

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
)

// metrics are the dispatcher's figures. No label holds a tenant, a runner or a dispatch: there may be thousands. What a label
// may be is a value of this code.
type metrics struct {
	ended    *prometheus.CounterVec // outcome, code
	inFlight prometheus.Gauge
	duration *prometheus.HistogramVec // outcome
	accept   prometheus.Histogram
	firstRow prometheus.Histogram
	rows     prometheus.Counter
	bytes    prometheus.Counter
	again    prometheus.Counter

	completed   prometheus.Counter // of ended, for those without an error
	completedIn prometheus.Observer

	registerer prometheus.Registerer
	registered []prometheus.Collector
}

func newMetrics(registerer prometheus.Registerer, receivers *bus.Receivers) (*metrics, error) {
	counter := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Namespace: "runbus", Name: name, Help: help}
	}
	histogram := func(name, help string, buckets []float64) prometheus.HistogramOpts {
		return prometheus.HistogramOpts{Namespace: "runbus", Subsystem: "dispatch", Name: name, Help: help, Buckets: buckets}
	}
	m := &metrics{
		ended: prometheus.NewCounterVec(counter("dispatches_total", "Dispatches that ended, by outcome and error code (ok for none)."), []string{"outcome", "code"}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: "runbus", Name: "dispatches_in_flight", Help: "Dispatches that run on this replica now.",
		}),
		duration: prometheus.NewHistogramVec(histogram("duration_seconds", "From the request to the end of a dispatch, by outcome.",
			prometheus.ExponentialBuckets(0.005, 3, 12)), []string{"outcome"}), // to 885 s
		accept: prometheus.NewHistogram(histogram("accept_seconds", "From the published assignment to the runner's acceptance.",
			prometheus.ExponentialBuckets(0.0005, 2, 14))), // to 4.1 s
		firstRow: prometheus.NewHistogram(histogram("first_row_seconds", "From the runner's acceptance to the first rows.",
			prometheus.ExponentialBuckets(0.001, 4, 10))), // to 262 s
		rows:       prometheus.NewCounter(counter("result_rows_total", "Rows that runners returned.")),
		bytes:      prometheus.NewCounter(counter("result_bytes_total", "Arrow bytes before compression that runners returned.")),
		again:      prometheus.NewCounter(counter("dispatch_assignments_republished_total", "Assignments that were published again after nobody had received them.")),
		registerer: registerer,
	}
	m.completed, m.completedIn = m.ended.WithLabelValues(OutcomeCompleted, "ok"), m.duration.WithLabelValues(OutcomeCompleted)
	if registerer == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.ended, m.inFlight, m.duration, m.accept, m.firstRow, m.rows, m.bytes, m.again, droppedCollector{receivers}} {
		if err := registerer.Register(c); err != nil {
			m.close()
			return nil, err
		}
		m.registered = append(m.registered, c)
	}
	return m, nil
}

// count adds one ended run.
func (m *metrics) count(run *run, o *Outcome) {
	ended, duration := m.completed, m.completedIn
	if o.Err != nil {
		ended, duration = m.ended.WithLabelValues(o.Code, string(o.Err.Code)), m.duration.WithLabelValues(o.Code)
	}
	ended.Inc()
	duration.Observe(run.ended.Sub(run.began).Seconds())
	if d, ok := hop(o.Phases, PhaseAssigned, PhaseAccepted); ok {
		m.accept.Observe(d.Seconds())
	}
	if d, ok := hop(o.Phases, PhaseAccepted, PhaseFirstRow); ok {
		m.firstRow.Observe(d.Seconds())
	}
	m.rows.Add(float64(max(run.rows, 0)))
	m.bytes.Add(float64(max(run.bytes, 0)))
}

// close takes the collectors out of the registerer.
func (m *metrics) close() {
	for _, c := range m.registered {
		m.registerer.Unregister(c)
	}
}

var droppedDesc = prometheus.NewDesc("runbus_results_dropped_total",
	"Messages of runners that belong to no dispatch that waits for them, by reason (SPEC D5).", []string{"reason"}, nil)

// droppedCollector reads the counts that the result streams keep.
type droppedCollector struct{ receivers *bus.Receivers }

func (c droppedCollector) Describe(ch chan<- *prometheus.Desc) { ch <- droppedDesc }

func (c droppedCollector) Collect(ch chan<- prometheus.Metric) {
	dropped := c.receivers.Dropped()
	for _, reason := range []bus.DropReason{
		bus.DropUnknown, bus.DropLate, bus.DropDuplicate, bus.DropForeign, bus.DropSession, bus.DropGap, bus.DropOverrun, bus.DropInvalid,
	} {
		ch <- prometheus.MustNewConstMetric(droppedDesc, prometheus.CounterValue, float64(dropped[reason]), string(reason))
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
