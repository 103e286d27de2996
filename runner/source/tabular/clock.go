package tabular

import "math"

// stamp is a date, or a timestamp, read from text.
type stamp struct {
	days    int64 // since 1970-01-01
	seconds int64 // of the day, zone applied; may be outside of it
	nanos   int64
	date    bool // without a time of day
	zone    bool
	places  int // digits of the fraction without zeros at the end
}

// classifyTime looks at a text that begins with a digit.
func classifyTime(s []byte) look {
	t, ok := scanStamp(s)
	switch {
	case !ok:
		return look{kind: kindText}
	case t.date:
		return look{kind: kindDate}
	}
	l := look{kind: kindTime, nano: t.places > 6}
	if t.zone {
		l.kind = kindTimeZ
	}
	_, fits := t.unixNano()
	l.outside = !fits
	return l
}

// scanStamp reads `2006-01-02`, and after it `T` or a space, `15:04`, `:05`, a fraction of 1–9 digits, and `Z`, `±07`, `±0700` or
// `±07:00`. The calendar is checked; 24:00 and leap seconds are not times here.
func scanStamp(s []byte) (stamp, bool) {
	var t stamp
	if len(s) < 10 || s[4] != '-' || s[7] != '-' {
		return t, false
	}
	y, ok1 := number2(s[0:2])
	y2, ok2 := number2(s[2:4])
	m, ok3 := number2(s[5:7])
	d, ok4 := number2(s[8:10])
	y = y*100 + y2
	if !ok1 || !ok2 || !ok3 || !ok4 || y < 1 || m < 1 || m > 12 || d < 1 || d > monthDays(y, m) {
		return t, false
	}
	t.days = daysOf(y, m, d)
	s = s[10:]
	if len(s) == 0 {
		t.date = true
		return t, true
	}
	if len(s) < 6 || s[0] != 'T' && s[0] != ' ' || s[3] != ':' {
		return t, false
	}
	hour, ok1 := number2(s[1:3])
	minute, ok2 := number2(s[4:6])
	if !ok1 || !ok2 || hour > 23 || minute > 59 {
		return t, false
	}
	t.seconds = hour*3600 + minute*60
	s = s[6:]
	if len(s) > 0 && s[0] == ':' {
		if len(s) < 3 {
			return t, false
		}
		second, ok := number2(s[1:3])
		if !ok || second > 59 {
			return t, false
		}
		t.seconds += second
		s = s[3:]
		if len(s) > 0 && s[0] == '.' {
			i, scale := 1, int64(100_000_000)
			for ; i < len(s) && s[i] >= '0' && s[i] <= '9'; i++ {
				if i > 9 {
					return t, false
				}
				t.nanos += int64(s[i]-'0') * scale
				scale /= 10
				if s[i] != '0' {
					t.places = i
				}
			}
			if i == 1 {
				return t, false
			}
			s = s[i:]
		}
	}
	if len(s) == 0 {
		return t, true
	}
	t.zone = true
	if len(s) == 1 && s[0] == 'Z' {
		return t, true
	}
	offset, ok := scanOffset(s)
	t.seconds -= offset
	return t, ok
}

// scanOffset reads ±07, ±0700 or ±07:00 as seconds.
func scanOffset(s []byte) (int64, bool) {
	if len(s) < 3 || s[0] != '+' && s[0] != '-' {
		return 0, false
	}
	hours, ok := number2(s[1:3])
	if !ok || hours > 23 {
		return 0, false
	}
	var minutes int64
	switch {
	case len(s) == 3:
	case len(s) == 5:
		minutes, ok = number2(s[3:5])
	case len(s) == 6 && s[3] == ':':
		minutes, ok = number2(s[4:6])
	default:
		ok = false
	}
	if !ok || minutes > 59 {
		return 0, false
	}
	v := hours*3600 + minutes*60
	if s[0] == '-' {
		v = -v
	}
	return v, true
}

func number2(s []byte) (int64, bool) {
	a, b := s[0]-'0', s[1]-'0'
	return int64(a)*10 + int64(b), a <= 9 && b <= 9
}

func monthDays(y, m int64) int64 {
	switch m {
	case 4, 6, 9, 11:
		return 30
	case 2:
		if y%4 == 0 && (y%100 != 0 || y%400 == 0) {
			return 29
		}
		return 28
	}
	return 31
}

// daysOf counts the days from 1970-01-01 to a date of the proleptic Gregorian calendar, years 1 to 9999. Years begin in
// March here, so that the leap day is the last of its year.
func daysOf(y, m, d int64) int64 {
	if m <= 2 {
		y--
		m += 12
	}
	return 365*y + y/4 - y/100 + y/400 + (153*(m-3)+2)/5 + d - 719469
}

func (t stamp) unixMicro() int64 { return (t.days*86400+t.seconds)*1_000_000 + t.nanos/1000 }

// unixNano is false for an instant that int64 nanoseconds don't hold (before 1677-09-21, after 2262-04-11).
func (t stamp) unixNano() (int64, bool) {
	s := t.days*86400 + t.seconds
	if s < math.MinInt64/1_000_000_000+1 || s > math.MaxInt64/1_000_000_000-1 {
		return 0, false
	}
	return s*1_000_000_000 + t.nanos, true
}
