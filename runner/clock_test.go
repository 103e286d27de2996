package runner

import (
	"testing"
	"time"
)

// The control plane's clock is taken over from a precise answer, and from a slow one only where nothing better is known, or where it
// contradicts what is known. Each case holds for a clock that is ahead as for one that is behind.
func TestClockTakesTheMorePreciseAnswer(t *testing.T) {
	type sample struct {
		sent        time.Duration // when, from the start on
		there, back time.Duration // how long the request took, and the answer
		ahead       time.Duration // the control plane's clock
	}
	const ms = time.Millisecond
	quick := sample{there: ms, back: ms}
	for what, c := range map[string]struct {
		samples []sample
		want    time.Duration // ahead, in the end
	}{
		"an even round trip":                {[]sample{{there: 10 * ms, back: 10 * ms, ahead: time.Hour}}, time.Hour},
		"the first one, however slow":       {[]sample{{there: 5 * time.Second, ahead: time.Minute}}, time.Minute + 2500*ms},
		"a slow answer":                     {[]sample{quick, {sent: time.Second, back: 5 * time.Second}}, 0},
		"a slow request":                    {[]sample{quick, {sent: time.Second, there: 5 * time.Second}}, 0},
		"a quick one after a slow one":      {[]sample{{back: 5 * time.Second}, {sent: 6 * time.Second, there: ms, back: ms}}, 0},
		"one as quick as before":            {[]sample{quick, {sent: time.Second, back: 2 * ms}}, -ms},
		"one hardly slower, soon":           {[]sample{quick, {sent: time.Second, there: 3 * ms}}, 0},
		"one hardly slower, later":          {[]sample{quick, {sent: time.Minute, there: 3 * ms}}, 1500 * time.Microsecond},
		"a slow one after ten hours":        {[]sample{quick, {sent: 10 * time.Hour, there: 5 * time.Second, back: 5 * time.Second, ahead: 4 * time.Second}}, 4 * time.Second},
		"a clock set, seen slowly":          {[]sample{quick, {sent: time.Second, there: 3 * time.Second, back: 3 * time.Second, ahead: time.Hour}}, time.Hour},
		"a clock set, seen quickly":         {[]sample{quick, {sent: time.Second, there: ms, back: ms, ahead: 50 * ms}}, 50 * ms},
		"a clock that may have been set":    {[]sample{quick, {sent: time.Second, there: 3 * time.Second, back: 3 * time.Second, ahead: 2 * time.Second}}, 0},
		"a clock set to and fro":            {[]sample{quick, {sent: time.Second, there: ms, back: 3 * ms, ahead: time.Hour}, {sent: 2 * time.Second, there: ms, back: 3 * ms}}, -ms},
		"a slow one, and the old one again": {[]sample{quick, {sent: time.Second, back: 9 * time.Second}, {sent: 11 * time.Second, back: 9 * time.Second}}, 0},
	} {
		for _, sign := range []time.Duration{1, -1} {
			start, clock := time.Now(), clock{}
			end := start
			for _, s := range c.samples {
				sent := start.Add(s.sent)
				there, back := s.there, s.back
				if sign < 0 { // what makes the clock seem to be ahead makes it seem to be behind the other way round
					there, back = back, there
				}
				end = sent.Add(there + back)
				clock.adjust(sent.Add(there+sign*s.ahead).Round(0), sent, end)
			}
			if got := clock.at(end).Sub(end.Round(0)); got != sign*c.want {
				t.Errorf("%s, direction %d: %s ahead, want %s", what, sign, got, sign*c.want)
			}
		}
	}
}

// Wherever the time of an answer went, the clock is at least what it says that it is.
func TestClockAtLeast(t *testing.T) {
	sent := time.Now()
	for _, there := range []time.Duration{0, time.Second, 4 * time.Second, 5 * time.Second} {
		got, is := sent.Add(5*time.Second), sent.Add(time.Hour)
		var clock clock
		clock.adjust(is.Add(there), sent, got)
		if wrong := clock.atLeast(got).Sub(is.Add(5 * time.Second)); wrong > 0 || wrong < -2*clock.bound(got) {
			t.Errorf("answered after %s: wrong by %s", there, wrong)
		}
	}
	var unset clock
	if !unset.atLeast(sent).Equal(sent) {
		t.Error("a clock that was not set is not the local one")
	}
}

// What a clock may be wrong by grows with the age of its setting: of two that went apart by as much as clocks do, none is thought to be
// further than it is.
func TestClockAtLeastGrowsOld(t *testing.T) {
	set := time.Now()
	for _, age := range []time.Duration{0, time.Minute, 11 * time.Hour, 30 * 24 * time.Hour} {
		for _, ppm := range []time.Duration{-clockDrift, -50, 0, 50, clockDrift} {
			var clock clock
			clock.adjust(set.Round(0), set, set)
			now := set.Add(age)
			is := now.Round(0).Add(age / 1_000_000 * ppm)
			if ahead := clock.atLeast(now).Sub(is); ahead > 0 {
				t.Errorf("%s old, %d ppm apart: ahead by %s", age, ppm, ahead)
			}
			if wrong := clock.at(now).Sub(is).Abs(); wrong > clock.bound(now) {
				t.Errorf("%s old, %d ppm apart: wrong by %s, thought to be %s at most", age, ppm, wrong, clock.bound(now))
			}
		}
	}
}
