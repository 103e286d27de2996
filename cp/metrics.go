package cp

import (
	"runtime"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/org-runink/runbus/cp/audit"
	"github.com/org-runink/runbus/cp/ops"
)

// newMetrics is the registry of the process's figures, with what Go and the system tell of it.
func newMetrics(version string) *prometheus.Registry {
	r := prometheus.NewRegistry()
	about := prometheus.NewGauge(prometheus.GaugeOpts{
		Namespace: "runbus", Name: "build_info", Help: "Always 1; the labels tell which build this is.",
		ConstLabels: prometheus.Labels{"version": version, "goversion": runtime.Version()},
	})
	about.Set(1)
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), about)
	return r
}

// watchParts adds the figures of parts that keep them themselves.
func watchParts(r prometheus.Registerer, log *audit.Log, copies *ops.Copies) {
	r.MustRegister(
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Namespace: "runbus", Subsystem: "audit", Name: "failing_seconds", Help: "For how long events have waited that can't be written; 0 when none does.",
		}, func() float64 {
			d, _ := log.Failing()
			return d.Seconds()
		}),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Namespace: "runbus", Subsystem: "ops", Name: "copies_dropped_total", Help: "Copies of work and control messages for operators that were not sent.",
		}, func() float64 { return float64(copies.Dropped()) }),
	)
}
