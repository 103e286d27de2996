package stack

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"
)

// alive is every process of this run of tests that has not ended.
var alive struct {
	mu     sync.Mutex
	all    []*Process
	looked time.Time
}

func (p *Process) enlist() {
	alive.mu.Lock()
	defer alive.mu.Unlock()
	alive.all = append(alive.all, p)
}

func (p *Process) discharge() {
	alive.mu.Lock()
	defer alive.mu.Unlock()
	alive.all = slices.DeleteFunc(alive.all, func(q *Process) bool { return q == p })
}

// lookEvery is how often all processes are looked at while others are started: it takes some hundredths of a second.
const lookEvery = time.Second

// lookAtAll looks at all processes, unless that was done just now.
func lookAtAll() {
	alive.mu.Lock()
	if time.Since(alive.looked) < lookEvery {
		alive.mu.Unlock()
		return
	}
	all := slices.Clone(alive.all)
	alive.looked = time.Now()
	alive.mu.Unlock()
	if len(all) == 0 {
		return
	}
	for _, p := range all {
		p.learnFiles()
		p.look()
	}
}

// lookClosely takes down what the kernel shows of the process now, and makes the keys known that it has now.
func (p *Process) lookClosely() {
	select {
	case <-p.exited:
	default:
		p.learnFiles()
		p.look()
	}
}

// childrenOf is those that the threads of a process started.
func childrenOf(pid int) (children []int) {
	dir := "/proc/" + strconv.Itoa(pid) + "/task"
	threads, err := os.ReadDir(dir)
	if err != nil {
		return nil // it has ended, or this is not Linux
	}
	for _, thread := range threads {
		b, err := os.ReadFile(filepath.Join(dir, thread.Name(), "children"))
		if err != nil {
			continue // the thread has ended
		}
		for _, child := range bytes.Fields(b) {
			if pid, err := strconv.Atoi(string(child)); err == nil {
				children = append(children, pid)
			}
		}
	}
	return children
}

// awaitStopped waits until every thread has stopped: until one of them has taken the signal the others go on, on a busy machine for long.
func (p *Process) awaitStopped(t testing.TB) {
	t.Helper()
	for give := time.Now().Add(Patience); !stopped(p.PID); <-time.After(time.Millisecond) {
		select {
		case <-p.exited:
			t.Fatalf("%s has ended and can't be stopped", p.Name)
		default:
		}
		if time.Now().After(give) {
			t.Fatalf("%s does not stop", p.Name)
		}
	}
}

// stopped reports whether all threads of a process have stopped by a signal.
func stopped(pid int) bool {
	files, err := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/stat")
	if err != nil || len(files) == 0 {
		return true // it has ended, or this is not Linux
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		_, state, found := bytes.Cut(b[bytes.LastIndexByte(b, ')')+1:], []byte(" ")) // behind the name, which may be anything
		if err != nil || !found || !bytes.HasPrefix(state, []byte("T")) {
			return false
		}
	}
	return true
}

// Look takes down what the kernel shows of the process and of all below it. Call it when a process that says nothing is past its start.
func (p *Process) Look() {
	p.past.Store(true)
	p.look()
}

// look takes down the command line and the environment of the process and of all below it. What it was started with counts once it has
// said something: a ticket comes in a variable, and is taken out of it before anything else happens. An environment that only root may
// read shows nothing to others.
func (p *Process) look() {
	select {
	case <-p.exited:
		return
	default:
	}
	past := p.past.Load() || p.Stdout.any() || p.Stderr.any()
	for queue := []int{p.PID}; len(queue) > 0; queue = queue[1:] {
		queue = append(queue, childrenOf(queue[0])...)
		dir := "/proc/" + strconv.Itoa(queue[0])
		whose := "of "
		if queue[0] != p.PID {
			whose = "of a child of "
		}
		for _, file := range []struct {
			name, what string
			counts     bool
		}{{"cmdline", "the command line ", true}, {"environ", "the environment ", past}} {
			if b, err := os.ReadFile(filepath.Join(dir, file.name)); err == nil && file.counts && len(b) > 0 {
				p.shown.Store(file.what+whose+p.Name, b, queue[0] == p.PID && file.name == "cmdline")
			}
		}
	}
}

// shown is what the kernel showed of a process, each text once.
type shown struct {
	mu   sync.Mutex
	seen map[string]bool
	list []sight
}

type sight struct {
	sink  string
	text  []byte
	given bool // by who started it
}

// Store keeps a text.
func (s *shown) Store(sink string, text []byte, given bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if key := sink + "\x00" + string(text); !s.seen[key] {
		if s.seen == nil {
			s.seen = map[string]bool{}
		}
		s.seen[key] = true
		s.list = append(s.list, sight{sink, text, given})
	}
}

// all is what was kept.
func (s *shown) all() []sight {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.list)
}
