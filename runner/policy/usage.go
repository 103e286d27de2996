package policy

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/org-runink/runbus/internal/durable"
)

// mostAhead bounds what is written into the file before it is sent: so much is counted too much, at most, when the process is killed.
const mostAhead = 16 << 20

// usage counts the bytes that were sent today, in a file that several processes may share. What is about to be sent is written
// ahead in blocks, so that neither a restart nor a crash makes the count smaller than the truth.
type usage struct {
	file string

	mu     sync.Mutex
	day    string           // of credit
	credit map[string]int64 // written ahead and not sent yet
	using  int              // fetches that run
}

// counts is the file: bytes by key in one day (UTC). A key is `total` or `rule:<name>`.
type counts struct {
	Day   string           `json:"day"`
	Bytes map[string]int64 `json:"bytes"`
}

const totalKey = "total"

func ruleKey(name string) string { return "rule:" + name }

// errUsedUp tells that a budget of the day is used up.
var errUsedUp = errors.New("used up")

// check tells whether the file can be read and written.
func (u *usage) check(today string) error {
	return u.update(today, func(map[string]int64) bool { return true })
}

// left is errUsedUp if nothing may be sent any more under key today.
func (u *usage) left(today, key string, limit int64) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.turn(today)
	if u.credit[key] > 0 {
		return nil
	}
	var used int64
	if err := u.update(today, func(sent map[string]int64) bool { used = sent[key]; return false }); err != nil {
		return err
	}
	if used >= limit {
		return errUsedUp
	}
	return nil
}

// spend counts n bytes that are about to be sent, or returns errUsedUp and counts nothing.
func (u *usage) spend(today, key string, limit, n int64) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.turn(today)
	if missing := n - u.credit[key]; missing > 0 {
		ahead := min(mostAhead, limit/64)
		full, take := false, int64(0)
		err := u.update(today, func(sent map[string]int64) bool {
			room := limit - sent[key]
			if full = room < missing; full {
				return false
			}
			take = min(room, missing+ahead)
			sent[key] += take
			return true
		})
		if err != nil {
			return err
		}
		if full {
			return errUsedUp
		}
		u.credit[key] += take
	}
	u.credit[key] -= n
	return nil
}

// turn forgets what was written ahead on another day.
func (u *usage) turn(today string) {
	if u.day != today {
		u.day = today
		clear(u.credit)
	}
}

// begin and end count the fetches: after the last one, what was written ahead is given back.
func (u *usage) begin() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.using++
}

func (u *usage) end(today string) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.using--
	u.turn(today)
	unsent := int64(0)
	for _, n := range u.credit {
		unsent += n
	}
	if u.using > 0 || unsent == 0 {
		return nil
	}
	defer clear(u.credit)
	return u.update(today, func(sent map[string]int64) bool {
		for key, n := range u.credit {
			sent[key] = max(0, sent[key]-n)
		}
		return true
	})
}

// update reads the counts of today and writes them again if change says so, while no other process does. A clock that was set back
// does not begin a new day: the counts of the later day go on.
func (u *usage) update(today string, change func(sent map[string]int64) bool) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("the count of the policy's budgets a day: %w", err)
		}
	}()
	if err := os.MkdirAll(filepath.Dir(u.file), 0o700); err != nil {
		return err
	}
	lock, err := os.OpenFile(u.file+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil { // ends with the file
		return err
	}
	c := counts{Day: today}
	text, err := os.ReadFile(u.file)
	switch {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return err
	default:
		if err := decodeCounts(text, &c); err != nil {
			return fmt.Errorf("%s is damaged: %w: put it right, or remove it to count from zero", u.file, err)
		}
	}
	if c.Day < today {
		c = counts{Day: today}
	}
	if c.Bytes == nil {
		c.Bytes = map[string]int64{}
	}
	if !change(c.Bytes) {
		return nil
	}
	return writeCounts(u.file, c)
}

func decodeCounts(text []byte, c *counts) error {
	if err := json.Unmarshal(text, c); err != nil {
		return err
	}
	if len(c.Day) != len("2006-01-02") {
		return errors.New("it names no day")
	}
	for key, n := range c.Bytes {
		if n < 0 || n > math.MaxInt64/2 {
			return fmt.Errorf("%s is not a count", quote(key))
		}
	}
	return nil
}

// writeCounts replaces the file in one step.
func writeCounts(file string, c counts) error {
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return durable.Replace(file, append(text, '\n'), nil)
}
