package httpsource

import "strings"

// nextLink finds the target of rel="next" in the Link headers of an answer (RFC 8288). Empty: there is none. Links with an
// anchor are about something else and skipped; what is malformed ends the header it stands in.
func nextLink(headers []string) string {
	for _, h := range headers {
		for h = strings.TrimLeft(h, " \t,"); h != ""; h = strings.TrimLeft(h, " \t,") {
			target, params, rest, ok := oneLink(h)
			if !ok {
				break
			}
			_, anchored := params["anchor"]
			for rel := range strings.FieldsSeq(params["rel"]) {
				if strings.EqualFold(rel, "next") && !anchored {
					return target
				}
			}
			h = rest
		}
	}
	return ""
}

// oneLink reads `<target>; name=value; name="value"` at the start of s. The first of several parameters of a name counts.
func oneLink(s string) (target string, params map[string]string, rest string, ok bool) {
	if s[0] != '<' {
		return "", nil, "", false
	}
	end := strings.IndexByte(s, '>')
	if end < 0 {
		return "", nil, "", false
	}
	target, s = strings.TrimSpace(s[1:end]), s[end+1:]
	params = map[string]string{}
	for {
		s = strings.TrimLeft(s, " \t")
		if s == "" || s[0] == ',' {
			return target, params, s, true
		}
		if s[0] != ';' {
			return "", nil, "", false
		}
		s = strings.TrimLeft(s[1:], " \t")
		n := strings.IndexAny(s, "=;,")
		if n < 0 {
			n = len(s)
		}
		name := strings.ToLower(strings.TrimRight(s[:n], " \t"))
		s = s[n:]
		value := ""
		if s != "" && s[0] == '=' {
			if value, s, ok = paramValue(strings.TrimLeft(s[1:], " \t")); !ok {
				return "", nil, "", false
			}
		}
		if _, twice := params[name]; !twice && name != "" {
			params[name] = value
		}
	}
}

// paramValue reads a token or a quoted string.
func paramValue(s string) (value, rest string, ok bool) {
	if s == "" || s[0] != '"' {
		n := strings.IndexAny(s, ";, \t")
		if n < 0 {
			n = len(s)
		}
		return s[:n], s[n:], true
	}
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '"':
			return b.String(), s[i+1:], true
		case '\\':
			if i++; i == len(s) {
				return "", "", false
			}
		}
		b.WriteByte(s[i])
	}
	return "", "", false
}
