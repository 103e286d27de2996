package embedded

// Alone reports whether nobody but connections of Connect is in account OPS.
func (s *Server) Alone() bool { return !s.watchers.some() }
