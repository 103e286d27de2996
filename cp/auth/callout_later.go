package auth

import "time"

const (
	// tardy is how much too late a timer comes in a process that stood still meanwhile, or that has too little of the processor.
	tardy = 500 * time.Millisecond
	// mostTardy is how often in a row that counts.
	mostTardy = 4
)

// later is a timer for what has to be done some time after it was asked for: no sooner than that, and no later than twice that. Who asks
// again meanwhile does not put it off, however often. Not safe for concurrent use.
//
// Others may have been about to do something in that time. Whether they had it, done tells: a round that came late leaves it as it was, and
// has another one follow. In a process that is late all the time each fifth counts all the same.
type later struct {
	timer      *time.Timer
	after      time.Duration
	due, again bool      // the timer runs; it was asked for since
	at         time.Time // when it is to come
	round      int       // how often it was set
	done       int       // the last round that came in time
	tardy      int       // those that did not, since
}

func newLater(after time.Duration) *later {
	return &later{timer: stopped(), after: after}
}

// stopped is a timer that does not run.
func stopped() *time.Timer {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return t
}

// ask returns the first round with all of its time still to come. It is over when done is no less.
func (l *later) ask() (round int) {
	if l.due {
		l.again = true
		return l.round + 1
	}
	l.due = true
	l.round++
	l.at = time.Now().Add(l.after)
	l.timer.Reset(l.after)
	return l.round
}

// came says that the timer's time has come.
func (l *later) came() {
	l.due = false
	if time.Since(l.at) > tardy && l.tardy < mostTardy {
		l.tardy++
		l.again = true
	} else {
		l.done, l.tardy = l.round, 0
	}
	if l.again {
		l.again = false
		l.ask()
	}
}
