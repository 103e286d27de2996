package registry

import (
	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the registry's figures. No label holds a tenant or a runner: there may be thousands.
type metrics struct {
	hellos, heartbeats, goodbyes, dropped *prometheus.CounterVec

	registerer prometheus.Registerer
	registered []prometheus.Collector
}

func newMetrics(r *Registry) (*metrics, error) {
	counter := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "runbus", Subsystem: "registry", Name: name, Help: help}, []string{label})
	}
	m := &metrics{
		hellos:     counter("hellos_total", "Hellos of runners, by result: ok or the code of the refusal.", "result"),
		heartbeats: counter("heartbeats_total", "Heartbeats of runners, by result.", "result"),
		goodbyes:   counter("goodbyes_total", "Goodbyes of runners, by result.", "result"),
		dropped:    counter("dropped_total", "Messages of runners that were dropped, by reason.", "reason"),
		registerer: r.d.Metrics,
	}
	// So that a rate is 0 and not absent before the first one.
	for _, c := range []*prometheus.CounterVec{m.hellos, m.heartbeats, m.goodbyes} {
		c.WithLabelValues("ok")
	}
	for _, reason := range []string{"subject", "overload", "flood", "hello_first", "foreign_reply", "late"} {
		m.dropped.WithLabelValues(reason)
	}
	if m.registerer == nil {
		return m, nil
	}
	connected := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Namespace: "runbus", Subsystem: "registry", Name: "connected_runners", Help: "Runners whose link is up and whose heartbeats come.",
	}, func() float64 { return float64(r.Connected()) })
	for _, c := range []prometheus.Collector{m.hellos, m.heartbeats, m.goodbyes, m.dropped, connected} {
		if err := m.registerer.Register(c); err != nil {
			m.close()
			return m, err
		}
		m.registered = append(m.registered, c)
	}
	return m, nil
}

// close takes the collectors out of the registerer, so that another registry can be made on it.
func (m *metrics) close() {
	for _, c := range m.registered {
		m.registerer.Unregister(c)
	}
}

// Connected is how many runners of all tenants are connected now, as this replica sees them.
func (r *Registry) Connected() int {
	now := r.d.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, tenant := range r.fleet {
		for _, rn := range tenant {
			if rn.status(now).connected {
				n++
			}
		}
	}
	return n
}
