package dispatch

import "github.com/oklog/ulid/v2"

// runs are dispatches by their ids. Each is put in and taken out once: in chains of its own, since a map takes five times as long for it.
// Ids are drawn here or, where Fetch takes a ULID from its caller, by that, which is of this process and draws it too: who asks for a fetch
// from outside has no say in it, so nobody can have them all in one chain. Not safe for concurrent use; the zero value is empty.
type runs struct {
	chains [1 << chainBits]*run // by run.next
	count  int
}

const chainBits = 10

// chain is where the chain begins that a run of this id, a ULID, is in: by its last eight digits, which are random.
func (s *runs) chain(id string) **run {
	const last, odd = ulid.EncodedSize - 8, 0x9e3779b97f4a7c15
	if len(id) != ulid.EncodedSize {
		return &s.chains[0]
	}
	d := id[last:]
	n := uint64(d[0]) | uint64(d[1])<<8 | uint64(d[2])<<16 | uint64(d[3])<<24 | uint64(d[4])<<32 | uint64(d[5])<<40 | uint64(d[6])<<48 | uint64(d[7])<<56
	return &s.chains[n*odd>>(64-chainBits)]
}

// find is the run of this id, nil if there is none.
func (s *runs) find(id string) *run {
	for r := *s.chain(id); r != nil; r = r.next {
		if r.id == id {
			return r
		}
	}
	return nil
}

// add puts a run in. There is none of its id.
func (s *runs) add(r *run) {
	first := s.chain(r.id)
	r.next, *first = *first, r
	s.count++
}

// remove takes a run out that is in.
func (s *runs) remove(r *run) {
	at := s.chain(r.id)
	for *at != r {
		at = &(*at).next
	}
	*at, r.next = r.next, nil
	s.count--
}

// all are those that are in, in no order. None may be put in or taken out meanwhile.
func (s *runs) all(yield func(*run) bool) {
	for _, r := range &s.chains {
		for ; r != nil; r = r.next {
			if !yield(r) {
				return
			}
		}
	}
}
