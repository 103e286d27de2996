package cp

import "testing"

func TestMemoryIsGivenBackAfterASurge(t *testing.T) {
	const mib = 1 << 20
	m := newMemory()
	var allocs uint64
	for i, look := range []struct {
		name              string
		alloc, live, held uint64 // MiB
		settled           uint64
		percent           int
		returns           bool
		looks             int // so often; 0 is once
	}{
		{name: "small and busy", alloc: 100, live: 20, held: 60, percent: busyPercent},
		{name: "small and calm", alloc: 1, live: 20, held: 60, percent: busyPercent},
		{name: "a fleet connects", alloc: 500, live: 250, held: 600, percent: busyPercent},
		{name: "it has connected", alloc: 5, live: 250, held: 700, percent: calmPercent},
		{name: "for a while", alloc: 5, live: 250, held: 700, percent: calmPercent},
		{name: "for long enough", alloc: 5, live: 250, held: 700, percent: calmPercent, returns: true, settled: 350},
		{name: "once is enough", alloc: 5, live: 250, held: 420, percent: calmPercent},
		{name: "for a while at least", alloc: 5, live: 250, held: 420, percent: calmPercent, looks: returnEvery - 2},
		{name: "what has gathered since", alloc: 5, live: 250, held: 420, percent: calmPercent, returns: true, settled: 350},
		{name: "little has", alloc: 5, live: 250, held: 370, percent: calmPercent, looks: 2 * returnEvery},
		{name: "some more is allocated", alloc: 100, live: 250, held: 370, percent: 60},
		{name: "results pass", alloc: 1000, live: 250, held: 600, percent: busyPercent},
		{name: "calm", alloc: 5, live: 250, held: 600, percent: calmPercent},
		{name: "calm", alloc: 5, live: 250, held: 600, percent: calmPercent},
		{name: "another surge goes back", alloc: 5, live: 250, held: 600, percent: calmPercent, returns: true, settled: 360},
		{name: "most runners leave", alloc: 2, live: 80, held: 150, percent: calmPercent, looks: returnEvery},
		{name: "then it counts from there", alloc: 2, live: 80, held: 180, percent: calmPercent, returns: true, settled: 150},
	} {
		for range max(look.looks, 1) {
			allocs += look.alloc * mib
			percent, returns := m.decide(allocs, look.live*mib, look.held*mib)
			if percent != look.percent || returns != look.returns {
				t.Errorf("%d, %s: %d %%, returns %t", i, look.name, percent, returns)
			}
		}
		if look.settled > 0 {
			m.settled = look.settled * mib
		}
	}
}

func TestMemoryIsMeasured(t *testing.T) {
	m := newMemory()
	m.look()
	if m.allocs == 0 {
		t.Error("nothing was ever allocated")
	}
}
