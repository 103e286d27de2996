package demodata_test

import (
	"bytes"
	"encoding/csv"
	"regexp"
	"strconv"
	"testing"

	"github.com/org-runink/runbus/cmd/runink/demodata"
)

// place derives period, group (0 for the f block) and block from an atomic number, by the lengths of the periods. The f block
// is taken as La–Yb and Ac–No, with Lu and Lr in group 3.
func place(z int) (period, group int, block string) {
	start, lengths := 1, []int{2, 8, 8, 18, 18, 32, 32}
	for i, n := range lengths {
		if z >= start+n {
			start += n
			continue
		}
		period = i + 1
		at, left := z-start, start+n-1-z // from the start, and to the noble gas at the end
		switch {
		case z == 2:
			return period, 18, "s"
		case at < 2:
			return period, at + 1, "s"
		case left < 6:
			return period, 18 - left, "p"
		case left < 16:
			return period, 18 - left, "d"
		}
		return period, 0, "f"
	}
	return 0, 0, ""
}

// What follows from an atomic number is as it must be, and names and symbols are of the right form, each once.
func TestTheFactsFollowFromTheNumber(t *testing.T) {
	rows, err := csv.NewReader(bytes.NewReader(demodata.CSV)).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	symbol, name := regexp.MustCompile(`^[A-Z][a-z]?$`), regexp.MustCompile(`^[A-Z][a-z]+$`)
	for i, r := range rows[1:] {
		period, group, block := place(i + 1)
		want := ""
		if group > 0 {
			want = strconv.Itoa(group)
		}
		if r[3] != strconv.Itoa(period) || r[4] != want || r[5] != block {
			t.Errorf("%s: period %s group %q block %s, want %d %q %s", r[2], r[3], r[4], r[5], period, want, block)
		}
		if !symbol.MatchString(r[1]) || !name.MatchString(r[2]) || seen[r[1]] || seen[r[2]] {
			t.Errorf("row %d: symbol %q, name %q", i+1, r[1], r[2])
		}
		seen[r[1]], seen[r[2]] = true, true
	}
}
