package runner

// Alive returns when the agent's table of works answers, as any of its tasks does sooner or later. It blocks while the agent is
// stuck: that is how a watchdog finds out.
func (a *Agent) Alive() { a.works.count() }
