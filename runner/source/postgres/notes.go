package postgres

import (
	"fmt"
	"sync"

	"github.com/org-runink/runbus/runner/source"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// maxNotes is how many different notices of one fetch are kept; the others are counted.
const maxNotes = 50

// notes gathers what the caller has to know while batches are read on one goroutine and written on another.
type notes struct {
	mu    sync.Mutex
	texts []string
	known map[string]bool
	more  int
}

func (n *notes) add(text string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.known[text]:
	case len(n.texts) == maxNotes:
		n.more++
	default:
		if n.known == nil {
			n.known = map[string]bool{}
		}
		n.known[text] = true
		n.texts = append(n.texts, text)
	}
}

// giveTo hands over what was gathered, through redact.
func (n *notes) giveTo(out *source.Output, redact func(string) string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, text := range n.texts {
		out.Notice(runbusv1.NoticeCode_NOTICE_CODE_SOURCE, redact(text))
	}
	if n.more > 0 {
		out.Notice(runbusv1.NoticeCode_NOTICE_CODE_SOURCE, fmt.Sprintf("PostgreSQL: %d more notices", n.more))
	}
	n.texts, n.more = nil, 0
}
