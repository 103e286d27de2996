package runner

import "time"

// fate is what became of a dispatch id.
type fate uint8

const (
	neverRun fate = iota + 1 // cancelled before it came, or dropped as late: it will not run
	answered                 // it runs, or ran, or was refused: its result tells
)

// seenLeast is how many dispatch ids are remembered at least. An assignment is accepted for seconds only: ids beyond are forgotten once
// theirs could not be accepted any more if it came again, or when there are seenMost.
const (
	seenLeast      = 16 << 10
	seenMost       = 256 << 10
	seenGeneration = 2 << 10 // ids that are forgotten together
)

// ulid is a dispatch id as every control plane makes them. Other ids are held too, as strings, which cost more to look up and to collect.
type ulid [26]byte

// fates is what became of every id that was ever assigned or cancelled, until it is forgotten: in generations, the youngest last. ULIDs
// grow with time, so that an id is mostly looked for in the youngest alone, which is small enough for a processor's own memory. In one map,
// forgotten one by one, ids took some 8 % of a small work's time, so it is 2 % (measured). Not safe for concurrent use.
type fates struct {
	generations []*generation
	count       int // of ids in them
}

// generation is ids that are forgotten together.
type generation struct {
	ulids   map[ulid]fate
	others  map[string]fate
	highest string        // no id in this generation, or an older one, is above it
	until   time.Duration // the uptime from which no assignment of theirs could be accepted any more
}

// of is what became of an id, 0 if it is not known.
func (f *fates) of(id string) fate {
	for i := len(f.generations) - 1; i >= 0 && id <= f.generations[i].highest; i-- {
		if became := f.generations[i].of(id); became != 0 {
			return became
		}
	}
	return 0
}

// remember notes what became of an id that is not known. Its assignment could be accepted until that uptime; now is the uptime.
func (f *fates) remember(id string, became fate, until, now time.Duration) {
	n := len(f.generations)
	if n == 0 || f.generations[n-1].len() >= seenGeneration {
		f.generations = append(f.generations, f.next(now))
		n = len(f.generations)
	}
	young := f.generations[n-1]
	young.add(id, became)
	young.highest, young.until = max(young.highest, id), max(young.until, until)
	f.count++
}

// next is an empty generation behind those that stay.
func (f *fates) next(now time.Duration) *generation {
	var memory *generation
	for len(f.generations) > 0 {
		oldest := f.generations[0]
		left := f.count - oldest.len()
		if left < seenLeast || oldest.until > now && f.count <= seenMost-seenGeneration {
			break
		}
		f.generations = append(f.generations[:0], f.generations[1:]...)
		f.count, memory = left, oldest
	}
	if memory == nil {
		memory = &generation{ulids: make(map[ulid]fate), others: make(map[string]fate)}
	}
	memory.clear()
	if n := len(f.generations); n > 0 {
		memory.highest = f.generations[n-1].highest
	}
	return memory
}

func (g *generation) of(id string) fate {
	if len(id) == len(ulid{}) {
		return g.ulids[ulid([]byte(id))]
	}
	return g.others[id]
}

func (g *generation) add(id string, became fate) {
	if len(id) == len(ulid{}) {
		g.ulids[ulid([]byte(id))] = became
		return
	}
	g.others[id] = became
}

func (g *generation) len() int { return len(g.ulids) + len(g.others) }

func (g *generation) clear() {
	clear(g.ulids)
	clear(g.others)
	g.highest, g.until = "", 0
}
