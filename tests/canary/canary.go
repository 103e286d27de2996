// Package canary finds secrets where none may be. A Set knows every secret of a run, in every form in which it may come by: as it is, in
// pieces, in base64, hexadecimal, percent-encoded, escaped, as numbers. What has the form of a credential of this platform is found
// without being known.
package canary

import (
	"bytes"
	"encoding/binary"
	"slices"
	"sync"
)

// Secret is one secret, without its value.
type Secret struct {
	// Kind names it in reports: "ticket", "runner token".
	Kind string
	// Born is where it first came up: that place may show it.
	Born string
}

// Hit is a secret that was found, and how it was written there.
type Hit struct {
	Secret
	Form string
}

// Set is the secrets of a run. It is safe for concurrent use; the zero value is not ready, see New.
type Set struct {
	mu       sync.RWMutex
	secrets  []Secret
	known    map[string]int     // core → secret
	patterns map[uint32][]match // by the first four bytes
	filter   filter             // of first bytes
}

// match is one form of one secret.
type match struct {
	text   []byte
	secret int
	form   string
}

// filter has a bit for each hash of four bytes with which a form begins.
type filter [1 << 14]uint64

// shortest is how many bytes a secret has at least: shorter ones are found by chance.
const shortest = 6

// New is an empty set, which finds what has the form of a credential.
func New() *Set {
	s := &Set{known: map[string]int{}, patterns: map[uint32][]match{}}
	for _, shape := range shapes {
		s.mark(binary.LittleEndian.Uint32([]byte(shape.prefix)))
	}
	return s
}

// Add makes a secret known. One that is known keeps its kind and the place of its birth. What is too short to be told from chance is not
// taken.
func (s *Set) Add(kind, born string, secret []byte, shape Shape) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.add(kind, born, secret, shape)
}

func (s *Set) add(kind, born string, secret []byte, shape Shape) {
	if _, known := s.known[string(secret)]; known || len(secret) < shortest {
		return
	}
	n := len(s.secrets)
	s.secrets, s.known[string(secret)] = append(s.secrets, Secret{kind, born}), n
	for _, f := range forms(secret, shape) {
		if len(f.text) < shortest {
			continue
		}
		first := binary.LittleEndian.Uint32(f.text)
		if !slices.ContainsFunc(s.patterns[first], func(m match) bool { return bytes.Equal(m.text, f.text) }) {
			s.patterns[first] = append(s.patterns[first], match{f.text, n, f.name})
			s.mark(first)
		}
	}
}

func hash(first uint32) uint32 { return first * 2654435761 >> 12 }

func (s *Set) mark(first uint32) {
	h := hash(first)
	s.filter[h>>6] |= 1 << (h & 63)
}

// next is the first place in text, from i on, where a form may begin, or one too near to the end. The race detector would make it twenty
// times slower; who calls it holds the lock.
//
//go:norace
func (f *filter) next(text []byte, i int) int {
	for ; i+4 <= len(text); i++ {
		h := hash(uint32(text[i]) | uint32(text[i+1])<<8 | uint32(text[i+2])<<16 | uint32(text[i+3])<<24)
		if f[h>>6]&(1<<(h&63)) != 0 {
			break
		}
	}
	return i
}

// Len is how many secrets are known.
func (s *Set) Len() int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return len(s.secrets)
}

// Kinds are the kinds of those that are known.
func (s *Set) Kinds() (kinds []string) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, secret := range s.secrets {
		if !slices.Contains(kinds, secret.Kind) {
			kinds = append(kinds, secret.Kind)
		}
	}
	return kinds
}

// Find returns the secrets in text, each once, but for those that allow (nil: none) says may be there.
func (s *Set) Find(text []byte, allow func(Secret) bool) (hits []Hit) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	found := map[int]bool{}
	for i := s.filter.next(text, 0); i+4 <= len(text); i = s.filter.next(text, i+1) {
		first := binary.LittleEndian.Uint32(text[i:])
		for _, m := range s.patterns[first] {
			if !found[m.secret] && bytes.HasPrefix(text[i:], m.text) {
				found[m.secret] = true
				if allow == nil || !allow(s.secrets[m.secret]) {
					hits = append(hits, Hit{s.secrets[m.secret], m.form})
				}
			}
		}
		if kind, size := s.unknown(text[i:]); kind != "" {
			if secret := (Secret{Kind: "unknown " + kind}); allow == nil || !allow(secret) {
				hits = append(hits, Hit{secret, "as it is"})
			}
			i += size - 1
		}
	}
	return hits
}

// unknown is what text begins with, if that is a credential that is not known, and its length.
func (s *Set) unknown(text []byte) (kind string, size int) {
	for _, shape := range shapes {
		if bytes.HasPrefix(text, []byte(shape.prefix)) {
			for _, c := range shape.read(text) {
				if _, known := s.known[string(c.core)]; !known {
					return c.kind, c.size
				}
			}
		}
	}
	return "", 0
}
