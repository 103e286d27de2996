package dispatch

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/schemas"
)

// metrics are the dispatcher's figures. No label holds a tenant, a runner or a dispatch: there may be thousands. What a label
// may be is a value of this code. They are counted under one lock: with a collector of its own for each, a dispatch had twenty
// operations that its processors have to agree on.
type metrics struct {
	receivers *bus.Receivers
	inFlight  func() int

	mu          sync.Mutex
	completed   uint64
	completedIn *histogram
	failed      map[failedAs]uint64   // those with an error
	failedIn    map[string]*histogram // by outcome
	accept      *histogram
	firstRow    *histogram
	rows, bytes int64
	again       uint64

	registerer prometheus.Registerer // nil: none
}

// failedAs is how a dispatch ended with an error.
type failedAs struct{ outcome, code string }

// Buckets in seconds.
var (
	durationBuckets = prometheus.ExponentialBuckets(0.005, 3, 12)  // to 885 s
	acceptBuckets   = prometheus.ExponentialBuckets(0.0005, 2, 14) // to 4.1 s
	firstRowBuckets = prometheus.ExponentialBuckets(0.001, 4, 10)  // to 262 s
)

var (
	endedDesc    = prometheus.NewDesc("runbus_dispatches_total", "Dispatches that ended, by outcome and error code (ok for none).", []string{"outcome", "code"}, nil)
	inFlightDesc = prometheus.NewDesc("runbus_dispatches_in_flight", "Dispatches that run on this replica now.", nil, nil)
	durationDesc = prometheus.NewDesc("runbus_dispatch_duration_seconds", "From the request to the end of a dispatch, by outcome.", []string{"outcome"}, nil)
	acceptDesc   = prometheus.NewDesc("runbus_dispatch_accept_seconds", "From the published assignment to the runner's acceptance.", nil, nil)
	firstRowDesc = prometheus.NewDesc("runbus_dispatch_first_row_seconds", "From the runner's acceptance to the first rows.", nil, nil)
	rowsDesc     = prometheus.NewDesc("runbus_result_rows_total", "Rows that runners returned.", nil, nil)
	bytesDesc    = prometheus.NewDesc("runbus_result_bytes_total", "Arrow bytes before compression that runners returned.", nil, nil)
	againDesc    = prometheus.NewDesc("runbus_dispatch_assignments_republished_total",
		"Assignments that were published again after nobody had received them.", nil, nil)
	droppedDesc = prometheus.NewDesc("runbus_results_dropped_total",
		"Messages of runners that belong to no dispatch that waits for them, by reason (SPEC D5).", []string{"reason"}, nil)
)

func newMetrics(registerer prometheus.Registerer, receivers *bus.Receivers, inFlight func() int) (*metrics, error) {
	m := &metrics{
		receivers: receivers, inFlight: inFlight, registerer: registerer,
		completedIn: newHistogram(durationBuckets), accept: newHistogram(acceptBuckets), firstRow: newHistogram(firstRowBuckets),
		failed: make(map[failedAs]uint64), failedIn: make(map[string]*histogram),
	}
	if registerer == nil {
		return m, nil
	}
	return m, registerer.Register(m)
}

// count adds one ended run.
func (m *metrics) count(run *run, o *Outcome) {
	ran := run.ended.Sub(run.began).Seconds()
	m.mu.Lock()
	defer m.mu.Unlock()
	if o.Err == nil {
		m.completed++
		m.completedIn.observe(ran)
	} else {
		m.failed[failedAs{o.Code, string(o.Err.Code)}]++
		if m.failedIn[o.Code] == nil {
			m.failedIn[o.Code] = newHistogram(durationBuckets)
		}
		m.failedIn[o.Code].observe(ran)
	}
	if run.accepted {
		m.accept.observe(run.acceptedAt.Sub(run.assignedAt).Seconds())
		if !run.firstRow.IsZero() {
			m.firstRow.observe(run.firstRow.Sub(run.acceptedAt).Seconds())
		}
	}
	m.rows += max(run.rows, 0)
	m.bytes += max(run.bytes, 0)
}

// republished counts an assignment that is published again.
func (m *metrics) republished() {
	m.mu.Lock()
	m.again++
	m.mu.Unlock()
}

// Describe is a prometheus.Collector's.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{endedDesc, inFlightDesc, durationDesc, acceptDesc, firstRowDesc, rowsDesc, bytesDesc, againDesc, droppedDesc} {
		ch <- d
	}
}

// Collect is a prometheus.Collector's.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.collect() {
		ch <- c
	}
}

// collect is Collect without waiting for anybody who takes it.
func (m *metrics) collect() []prometheus.Metric {
	inFlight, dropped := m.inFlight(), m.receivers.Dropped()
	counter := func(d *prometheus.Desc, n float64, labels ...string) prometheus.Metric {
		return prometheus.MustNewConstMetric(d, prometheus.CounterValue, n, labels...)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	all := []prometheus.Metric{
		counter(endedDesc, float64(m.completed), OutcomeCompleted, "ok"),
		m.completedIn.metric(durationDesc, OutcomeCompleted),
		m.accept.metric(acceptDesc), m.firstRow.metric(firstRowDesc),
		counter(rowsDesc, float64(m.rows)), counter(bytesDesc, float64(m.bytes)), counter(againDesc, float64(m.again)),
		prometheus.MustNewConstMetric(inFlightDesc, prometheus.GaugeValue, float64(inFlight)),
	}
	for f, n := range m.failed {
		all = append(all, counter(endedDesc, float64(n), f.outcome, f.code))
	}
	for outcome, h := range m.failedIn {
		all = append(all, h.metric(durationDesc, outcome))
	}
	for _, reason := range []bus.DropReason{
		bus.DropUnknown, bus.DropLate, bus.DropDuplicate, bus.DropForeign, bus.DropSession, bus.DropGap, bus.DropOverrun, bus.DropInvalid,
	} {
		all = append(all, counter(droppedDesc, float64(dropped[reason]), string(reason)))
	}
	return all
}

// close takes them out of the registerer.
func (m *metrics) close() {
	if m.registerer != nil {
		m.registerer.Unregister(m)
	}
}

// histogram counts values by the bucket that they fall into. Not safe for concurrent use.
type histogram struct {
	bounds []float64 // upper ones, which belong to their bucket
	counts []uint64
	count  uint64
	sum    float64
}

func newHistogram(bounds []float64) *histogram {
	return &histogram{bounds: bounds, counts: make([]uint64, len(bounds))}
}

func (h *histogram) observe(v float64) {
	for i, bound := range h.bounds {
		if v <= bound {
			h.counts[i]++
			break
		}
	}
	h.count++
	h.sum += v
}

// metric is what has been observed.
func (h *histogram) metric(d *prometheus.Desc, labels ...string) prometheus.Metric {
	below, buckets := uint64(0), make(map[float64]uint64, len(h.bounds))
	for i, bound := range h.bounds {
		below += h.counts[i]
		buckets[bound] = below
	}
	return prometheus.MustNewConstHistogram(d, h.count, h.sum, buckets, labels...)
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
