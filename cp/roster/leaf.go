package roster

// Pinned is the leaf of that fingerprint if the runner may have it now: Current, or Next before its promotion. Nil: it is neither, or
// the runner is not ACTIVE.
func (r Runner) Pinned(fingerprint string) *Leaf {
	if r.State != Active {
		return nil
	}
	for _, leaf := range []*Leaf{r.Current, r.Next} {
		if leaf != nil && leaf.Fingerprint == fingerprint {
			return leaf
		}
	}
	return nil
}
