package runner

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/org-runink/runbus/schemas"
)

// The oldest ids are forgotten first, but none that could be accepted if it came again, and they are bounded all the same. That holds for
// the ids of control planes as for any others.
func TestFatesAreBounded(t *testing.T) {
	ulids := schemas.NewULID(time.Now())[:16]
	for name, id := range map[string]func(int) string{
		"ULIDs":  func(i int) string { return ulids + fmt.Sprintf("%010d", i) },
		"others": func(i int) string { return "d" + strconv.Itoa(i) },
	} {
		t.Run(name, func(t *testing.T) {
			var f fates
			next := 0
			add := func(n int, until, now time.Duration) {
				for range n {
					if f.of(id(next)) != 0 {
						t.Fatalf("%s is known before it came", id(next))
					}
					f.remember(id(next), answered, until, now)
					next++
				}
			}
			check := func(least, most int) {
				t.Helper()
				known := 0
				for _, g := range f.generations {
					known += g.len()
				}
				if known != f.count || known < least || known > most {
					t.Fatalf("%d ids, counted as %d, not %d to %d", known, f.count, least, most)
				}
				for i := next - least; i < next; i++ {
					if f.of(id(i)) != answered {
						t.Fatalf("%s, of the last %d, is forgotten", id(i), least)
					}
				}
				if f.of(id(next-most-1)) != 0 {
					t.Fatalf("%s is known still", id(next-most-1))
				}
			}
			const most = seenLeast + seenGeneration
			add(5*seenLeast+7, 0, 1)
			check(seenLeast, most)
			before := next
			add(3*seenLeast, time.Hour, 1)
			check(next-before, next-before+most) // all could come again
			add(2*seenLeast, 0, time.Hour)
			check(seenLeast, most)
			add(seenMost+seenLeast, 2*time.Hour, time.Hour)
			check(seenMost-2*seenGeneration, seenMost)
		})
	}
}

// Ids are found whatever order they came in.
func TestFatesInAnyOrder(t *testing.T) {
	var f fates
	id := func(i int) string { return fmt.Sprintf("01%024d", i) }
	const n = 3 * seenGeneration
	for i := range n {
		f.remember(id((i*7919+n/2)%n), answered, 0, 1)
	}
	for i := range n {
		if f.of(id(i)) != answered {
			t.Fatalf("%s is not known", id(i))
		}
	}
	if f.of(id(n)) != 0 || f.of("d1") != 0 {
		t.Error("an id is known that never came")
	}
}
