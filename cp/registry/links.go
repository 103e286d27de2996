package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/org-runink/runbus/schemas"
)

// Subjects of the system account.
const (
	connectSubject    = "$SYS.ACCOUNT.RUN.CONNECT"
	disconnectSubject = "$SYS.ACCOUNT.RUN.DISCONNECT"
	connzAllSubject   = "$SYS.REQ.SERVER.PING.CONNZ"
	connzOneSubject   = "$SYS.REQ.SERVER.%s.CONNZ"
)

const (
	scanPage    = 8192                   // connections an answer: a server goes through all of them for each page
	scanFirst   = 2 * time.Second        // wait for the first server
	scanQuick   = 20 * time.Millisecond  // wait for one more, at the start
	scanFull    = 300 * time.Millisecond // wait for one more, later
	scanGap     = 250 * time.Millisecond // between two scans
	suspectMost = 2                      // scans that a server may miss before its links count as ended
	// endedFor is how long the end of a link is remembered: its begin may be heard of later, and its server may list it until it has
	// cleared it away.
	endedFor = time.Minute
)

// errNoServer is why a scan found nothing.
var errNoServer = errors.New("scan links: no server answered")

// linkKey names one connection of one server for as long as that server runs.
type linkKey struct {
	server string
	client uint64
}

// link is the connection of one process of a runner.
type link struct {
	key    linkKey
	at     time.Time // when this replica saw it come up
	start  time.Time // by the server's clock
	missed int       // scans that its server did not answer
	older  bool      // another link of the process was heard of that seems to be older
}

// processLinks are the newest link of each process of one runner: hardly ever of more than one, for which a map would take 900 bytes.
type processLinks []processLink

type processLink struct {
	nonce string
	link
}

// of is the link of a process; the zero link if it has none.
func (p processLinks) of(nonce string) (l link, linked bool) {
	for i := range p {
		if p[i].nonce == nonce {
			return p[i].link, true
		}
	}
	return link{}, false
}

// heard takes in the link of a process, unless that has it already, or a newer one; changed: it has taken it.
func (p *processLinks) heard(nonce string, l link) (changed bool) {
	for i := range *p {
		if have := &(*p)[i]; have.nonce == nonce {
			switch {
			case have.key == l.key:
				return false
			case have.start.After(l.start):
				have.older = true
				return false
			}
		}
	}
	p.set(nonce, l)
	return true
}

// set makes l the link of a process.
func (p *processLinks) set(nonce string, l link) {
	for i := range *p {
		if (*p)[i].nonce == nonce {
			(*p)[i].link = l
			return
		}
	}
	*p = append(*p, processLink{nonce, l})
}

// drop forgets the link of a process.
func (p *processLinks) drop(nonce string) {
	*p = slices.DeleteFunc(*p, func(l processLink) bool { return l.nonce == nonce })
}

// clientInfo is what events and scans tell of a connection. User is the name that the callout put into the JWT,
// `<tenant>/<runner>`; Name is the CONNECT name that the callout checked, `<runner>/<nonce>`.
type clientInfo struct {
	ID    uint64    `json:"id"`
	CID   uint64    `json:"cid"`
	User  string    `json:"user"`
	Auth  string    `json:"authorized_user"`
	Name  string    `json:"name"`
	Start time.Time `json:"start"`
}

// runner reads whose connection it is; false for one of the control plane's own.
func (c clientInfo) runner() (ref schemas.RunnerRef, nonce string, ok bool) {
	user := c.User
	if user == "" {
		user = c.Auth
	}
	ref, err := schemas.ParseRunnerRef(user)
	if err != nil {
		return ref, "", false
	}
	id, nonce, err := schemas.ParseConnectName(c.Name)
	return ref, nonce, err == nil && id == ref.Runner
}

type linkEvent struct {
	Server struct {
		ID string `json:"id"`
	} `json:"server"`
	Client clientInfo `json:"client"`
}

// followLinks subscribes the link events and the return of the system connection itself.
func (r *Registry) followLinks() error {
	for subject, take := range map[string]func(linkEvent){connectSubject: r.linkUp, disconnectSubject: r.linkDown} {
		sub, err := r.d.Sys.Subscribe(subject, func(msg *nats.Msg) {
			var e linkEvent
			if err := json.Unmarshal(msg.Data, &e); err != nil {
				r.d.Log.Warn("unreadable link event", "error", err)
				return
			}
			take(e)
		})
		if err != nil {
			return fmt.Errorf("subscribe %s: %w", subject, err)
		}
		if err := sub.SetPendingLimits(-1, -1); err != nil {
			return fmt.Errorf("subscribe %s: %w", subject, err)
		}
		r.subs = append(r.subs, sub)
	}
	return r.d.Sys.Flush()
}

func (r *Registry) linkUp(e linkEvent) {
	ref, nonce, ok := e.Client.runner()
	if !ok {
		return
	}
	l := link{key: linkKey{shared(e.Server.ID), e.Client.ID}, at: r.d.Now(), start: e.Client.Start}
	used := false
	r.update(ref, func(rn *runner) {
		if _, over := r.ended[l.key]; over {
			return // begins and ends are heard of by two goroutines
		}
		rn.links.heard(nonce, l)
		have, _ := rn.links.of(nonce)
		used = have.key == l.key // also if a scan has found it first
	})
	if used {
		r.handovers.linked(ref, l.key)
	}
}

// linkDown ignores the end of a link that isn't the process's current one: after a silent cut the new link comes seconds
// before the old one is given up.
func (r *Registry) linkDown(e linkEvent) {
	ref, nonce, ok := e.Client.runner()
	if !ok {
		return
	}
	key := linkKey{shared(e.Server.ID), e.Client.ID}
	r.update(ref, func(rn *runner) {
		r.ended[key] = time.Now()
		if l, _ := rn.links.of(nonce); l.key == key {
			rn.links.drop(nonce)
			if l.older { // by the clock of another server: it may go on
				r.askScan()
			}
			if nonce == rn.rec.ProcessNonce { // who only asked, or was replaced, says nothing about the runner
				r.notes.add(ref, rn.rec.Name, rn.rec.Version, r.d.Now())
			}
		}
	})
}

// askScan asks for a scan soon.
func (r *Registry) askScan() {
	select {
	case r.rescan <- struct{}{}:
	default:
	}
}

// scanTask scans every 30 s, when asked, and when the system connection came back.
func (r *Registry) scanTask(ctx context.Context) error {
	back := r.d.Sys.StatusChanged(nats.CONNECTED)
	defer r.d.Sys.RemoveStatusListener(back)
	tick := time.NewTicker(scanEvery)
	defer tick.Stop()
	gap := time.NewTimer(0)
	defer gap.Stop()
	for {
		select {
		case <-gap.C:
		case <-ctx.Done():
			return nil
		}
		if err := r.scanLinks(ctx, scanFull); err != nil && ctx.Err() == nil {
			r.d.Log.Warn("links were not scanned", "error", err)
		}
		select {
		case <-tick.C:
		case <-r.rescan:
		case <-back:
		case <-ctx.Done():
			return nil
		}
		gap.Reset(scanGap)
	}
}

type connz struct {
	Server struct {
		ID string `json:"id"`
	} `json:"server"`
	Data struct {
		Total  int          `json:"total"`
		Offset int          `json:"offset"`
		Conns  []clientInfo `json:"connections"`
	} `json:"data"`
	Error *struct {
		Description string `json:"description"`
	} `json:"error"`
}

// scanLinks asks all servers for their connections and corrects the links: events can get lost. After the first answer it
// waits quiet for each further server. Only one scan runs at a time.
func (r *Registry) scanLinks(ctx context.Context, quiet time.Duration) error {
	began, forget := r.d.Now(), time.Now().Add(-endedFor)
	servers, err := r.collectConnz(ctx, quiet)
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		r.applyScan(servers, began)
	}
	maps.DeleteFunc(r.ended, func(_ linkKey, at time.Time) bool { return at.Before(forget) })
	return err
}

// firstScan is the scan of the start. A host may stand still for longer than a scan waits, and nobody is served yet that would wait.
func (r *Registry) firstScan(ctx context.Context) error {
	for {
		err := r.scanLinks(ctx, scanQuick)
		if !errors.Is(err, errNoServer) || ctx.Err() != nil {
			return err
		}
		r.d.Log.Warn("no server told of its links; it is asked again", "error", err)
	}
}

// collectConnz returns the connections of each server that answered whole.
func (r *Registry) collectConnz(ctx context.Context, quiet time.Duration) (map[string][]clientInfo, error) {
	inbox := r.d.Sys.NewInbox()
	sub, err := r.d.Sys.SubscribeSync(inbox)
	if err != nil {
		return nil, fmt.Errorf("scan links: %w", err)
	}
	defer func() { _ = sub.Unsubscribe() }() // fails only on a closed connection
	ask := func(subject string, offset int) error {
		body, err := json.Marshal(map[string]any{"acc": "RUN", "auth": true, "limit": scanPage, "offset": offset})
		if err != nil {
			return err
		}
		return r.d.Sys.PublishRequest(subject, inbox, body)
	}
	if err := ask(connzAllSubject, 0); err != nil {
		return nil, fmt.Errorf("scan links: %w", err)
	}
	servers, open := make(map[string][]clientInfo), make(map[string]bool)
	for wait := scanFirst; ; {
		one, cancel := context.WithTimeout(ctx, wait)
		msg, err := sub.NextMsgWithContext(one)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			for id, more := range open {
				if more {
					delete(servers, id)
				}
			}
			if len(servers) == 0 {
				return nil, errNoServer
			}
			return servers, nil
		}
		if err != nil {
			return nil, fmt.Errorf("scan links: %w", err)
		}
		var page connz
		if err := json.Unmarshal(msg.Data, &page); err != nil {
			return nil, fmt.Errorf("scan links: %w", err)
		}
		if page.Error != nil {
			return nil, fmt.Errorf("scan links: %s", page.Error.Description)
		}
		id := page.Server.ID
		servers[id] = append(servers[id], page.Data.Conns...)
		next := page.Data.Offset + scanPage
		open[id] = next < page.Data.Total
		wait = quiet
		if open[id] {
			if err := ask(fmt.Sprintf(connzOneSubject, id), next); err != nil {
				return nil, fmt.Errorf("scan links: %w", err)
			}
		}
		for _, more := range open {
			if more {
				wait = scanFirst
			}
		}
	}
}

// applyScan makes the links what the servers say, but for what changed since the scan began. The links of a server that
// didn't answer are suspect: a killed server reports no end. r.mu must be held.
func (r *Registry) applyScan(servers map[string][]clientInfo, began time.Time) {
	found := make(map[linkKey]bool)
	changed := false
	touch := func(rn *runner) {
		changed = true
		r.review(rn)
		rn.changes.Add(1)
		r.answers.meanings.Add(1)
	}
	for server, conns := range servers {
		server = shared(server)
		for _, c := range conns {
			ref, nonce, ok := c.runner()
			key := linkKey{server, c.CID}
			if _, ended := r.ended[key]; !ok || ended {
				continue
			}
			found[key] = true
			rn := r.runner(ref)
			if rn.links.heard(nonce, link{key: key, at: r.d.Now(), start: c.Start}) {
				touch(rn)
			}
		}
	}
	for _, tenant := range r.fleet {
		for _, rn := range tenant {
			had := len(rn.links)
			for i := range rn.links {
				l := &rn.links[i].link
				_, answered := servers[l.key.server]
				switch {
				case found[l.key]:
					l.missed = 0
				case !l.at.Before(began):
				case answered:
					l.missed = suspectMost
				default:
					l.missed++
				}
			}
			rn.links = slices.DeleteFunc(rn.links, func(l processLink) bool {
				over := l.missed >= suspectMost
				if over && l.older { // see linkDown
					r.askScan()
				}
				return over
			})
			if len(rn.links) < had {
				touch(rn)
			}
		}
	}
	if changed {
		r.signal()
	}
}
