package trace

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the recorder's figures.
type metrics struct {
	written prometheus.Counter
	failed  prometheus.Counter
	lost    *prometheus.CounterVec // reason

	registerer prometheus.Registerer
	registered []prometheus.Collector
}

func newMetrics(registerer prometheus.Registerer) (metrics, error) {
	opts := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Namespace: "runbus", Subsystem: "trace", Name: name, Help: help}
	}
	m := metrics{
		written:    prometheus.NewCounter(opts("timelines_written_total", "Timelines of ended dispatches that were stored.")),
		failed:     prometheus.NewCounter(opts("write_failures_total", "Writes to the stream of timelines that failed; they are tried again.")),
		lost:       prometheus.NewCounterVec(opts("timelines_lost_total", "Timelines that were dropped before they were stored, by reason."), []string{"reason"}),
		registerer: registerer,
	}
	m.lost.WithLabelValues("full")
	if registerer == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.written, m.failed, m.lost} {
		if err := registerer.Register(c); err != nil {
			m.close()
			return m, err
		}
		m.registered = append(m.registered, c)
	}
	return m, nil
}

func (m *metrics) close() {
	for _, c := range m.registered {
		m.registerer.Unregister(c)
	}
}

// clip shortens the text of an error.
func clip(s string) string {
	if len(s) <= maxText {
		return s
	}
	return strings.ToValidUTF8(s[:maxText], "") + "…"
}
