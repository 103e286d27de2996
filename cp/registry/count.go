package registry

// Connected is how many runners of all tenants are connected now, as this replica sees them.
func (r *Registry) Connected() int { return r.countConnected() }
