package tabular

// stats are what the rows taught about one column.
type stats struct {
	kinds   uint16 // bit per kind
	strings bool   // JSON strings among the values
	scalars bool   // JSON numbers or booleans
	nested  bool   // JSON objects or arrays
	wide    bool
	nano    bool
	outside bool
}

func bit(k kind) uint16 { return 1 << k }

func (s *stats) observe(c cell) {
	switch c.form {
	case cellNull:
	case cellText:
		if len(c.text) == 0 || s.kinds == bit(kindText) { // text stays text: no need to look
			return
		}
		s.note(classify(c.text))
	case cellString:
		s.strings = true
		if s.kinds&bit(kindText) != 0 {
			return
		}
		inner := c.text[1 : len(c.text)-1]
		l := look{kind: kindText}
		if len(inner) >= 10 && inner[0] >= '0' && inner[0] <= '9' { // an escape is no part of a date
			l = classifyTime(inner)
		}
		s.note(l)
	case cellNumber:
		s.scalars = true
		l := classifyNumber(c.text)
		if l.kind == kindNone {
			l.kind = kindNumber
		}
		s.note(l)
	case cellBool:
		s.scalars = true
		s.note(look{kind: kindBool})
	case cellNested:
		s.nested = true
	}
}

func (s *stats) note(l look) {
	s.kinds |= bit(l.kind)
	s.wide = s.wide || l.wide
	s.nano = s.nano || l.nano
	s.outside = s.outside || l.outside
}

// decide is the kind of the column (see the package).
func (s *stats) decide() kind {
	if s.nested || s.strings && s.scalars {
		return kindJSON
	}
	mixed := kindText
	if s.scalars {
		mixed = kindJSON // literals of JSON as they are
	}
	switch s.kinds {
	case 0:
		return kindText
	case bit(kindBool):
		return kindBool
	case bit(kindInt):
		return kindInt
	case bit(kindBigInt), bit(kindInt) | bit(kindBigInt):
		return kindBigInt
	case bit(kindFloat):
		return kindFloat
	case bit(kindFloat) | bit(kindInt):
		if s.wide {
			return mixed
		}
		return kindFloat
	case bit(kindDate):
		return kindDate
	case bit(kindTime), bit(kindTimeZ):
		if s.nano && s.outside {
			return kindText
		}
		if s.kinds == bit(kindTime) {
			return kindTime
		}
		return kindTimeZ
	}
	return mixed
}
