package canary

// overlap is how much of what came before a Writer looks at again: a secret may come in two parts. No form of a credential is longer.
const overlap = 16 << 10

// Writer looks at a stream of any length, and into the packed messages of the audit, if it is a file of JetStream's. It never fails. It is
// not safe for concurrent use.
type Writer struct {
	set    *Set
	allow  func(Secret) bool
	held   []byte
	packed unpacker
	hits   []Hit
}

// NewWriter is one that looks for the secrets that are known when a part of the stream is looked at.
func (s *Set) NewWriter(allow func(Secret) bool) *Writer { return &Writer{set: s, allow: allow} }

// Write takes the next part.
func (w *Writer) Write(p []byte) (int, error) {
	w.held = append(w.held, p...)
	if len(w.held) >= 4*overlap {
		w.look(overlap)
	}
	w.packed.take(p, false, w.unpacked)
	return len(p), nil
}

// look looks at what is held and keeps the end of it.
func (w *Writer) look(keep int) {
	w.hits = append(w.hits, w.set.Find(w.held, w.allow)...)
	w.held = append(w.held[:0], w.held[max(0, len(w.held)-keep):]...)
}

// unpacked looks at what was packed.
func (w *Writer) unpacked(text []byte) {
	for _, hit := range w.set.Find(text, w.allow) {
		hit.Form = "packed, " + hit.Form
		w.hits = append(w.hits, hit)
	}
}

// Hits looks at the rest and returns what was found, each kind that was born in one place once.
func (w *Writer) Hits() (once []Hit) {
	w.look(0)
	w.packed.take(nil, true, w.unpacked)
	seen := map[Secret]bool{}
	for _, hit := range w.hits {
		if !seen[hit.Secret] {
			seen[hit.Secret] = true
			once = append(once, hit)
		}
	}
	return once
}
