package auth

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	// rescanEvery is how often a replica looks for connections of ended keys on its server.
	rescanEvery = 30 * time.Second
	// rescanLate is when it looks again after a revocation: a request that was answered just before it has become a
	// connection by then, or never will.
	rescanLate = answerWithin + 700*time.Millisecond
	// unknownGrace is how old a connection of an unknown key must be to be cut: the view may be behind the replica that let
	// it in.
	unknownGrace = time.Minute
	sysTimeout   = 2 * time.Second
	connzPage    = 8192 // connections an answer: the server goes through all of them for each page
)

// link is one connection: a server never uses a client id twice.
type link struct {
	server string
	client uint64
}

// links remembers the connections that were let in with a key, on whatever server, so that a revocation cuts them at once.
// The scan of the own server is what finds the rest.
type links struct {
	mu    sync.Mutex
	byKey map[string][]link
}

func newLinks() *links { return &links{byKey: map[string][]link{}} }

func (l *links) add(key string, at link) {
	const most = 64 // newest ones
	l.mu.Lock()
	defer l.mu.Unlock()
	l.byKey[key] = append(l.byKey[key], at)
	if over := len(l.byKey[key]) - most; over > 0 {
		l.byKey[key] = slices.Delete(l.byKey[key], 0, over)
	}
}

// take returns and forgets the links of a key.
func (l *links) take(key string) []link {
	l.mu.Lock()
	defer l.mu.Unlock()
	list := l.byKey[key]
	delete(l.byKey, key)
	return list
}

// kicker cuts the connections of ended keys.
type kicker struct {
	s       *callout
	keys    chan Key
	rescan  chan struct{}
	leaves  chan struct{} // some leaf has ended
	stopped atomic.Bool

	// Of run alone.
	late     *later
	retry    *time.Timer    // of a scan that failed
	pause    time.Duration  // the last one before such a retry; 0: the last scan did not fail
	leafEnds map[string]int // leaves of connections on the own server that have ended, with the round of late in which they are told
}

func newKicker(s *callout) *kicker {
	return &kicker{
		s: s, keys: make(chan Key, 256), rescan: make(chan struct{}, 1), leaves: make(chan struct{}, 1),
		late: newLater(rescanLate), retry: stopped(), leafEnds: make(map[string]int),
	}
}

// revoked hands a revocation over. It never blocks: when too many come at once a scan finds them.
func (k *kicker) revoked(key Key) {
	if k.stopped.Load() {
		return
	}
	select {
	case k.keys <- key:
	default:
		k.scanSoon()
	}
}

// leavesEnded has the connections of ended leaves cut a little later: the replica that holds the link of a revoked runner says goodbye
// first, and closes it by itself (SPEC C9). It never blocks.
func (k *kicker) leavesEnded() {
	if k.stopped.Load() {
		return
	}
	select {
	case k.leaves <- struct{}{}:
	default:
	}
}

func (k *kicker) scanSoon() {
	select {
	case k.rescan <- struct{}{}:
	default: // one is due already
	}
}

func (k *kicker) stop() { k.stopped.Store(true) }

func (k *kicker) run(ctx context.Context) error {
	back := k.s.c.Sys.StatusChanged(nats.CONNECTED)
	defer k.s.c.Sys.RemoveStatusListener(back)
	every := time.NewTicker(rescanEvery)
	defer every.Stop()
	late := k.late
	defer late.timer.Stop()
	defer k.retry.Stop()
	late.ask() // for what was let in while this replica was starting
	for {
		select {
		case <-ctx.Done():
			return nil
		case key := <-k.keys:
			k.cutLinks(ctx, key)
			k.cutQueued(ctx)
			late.ask()
		case <-k.leaves:
			late.ask()
			continue
		case <-k.rescan:
		case <-back:
		case <-every.C:
		case <-k.retry.C:
		case <-late.timer.C:
			late.came()
		}
		k.look(ctx)
	}
}

// look scans. A scan that fails, as one that the server answered too late, is made again soon: the next regular one comes in half a
// minute, and so long a revoked key might stay connected. Those that fail in a row come ever less often, and the first alone is worth a
// warning.
func (k *kicker) look(ctx context.Context) {
	err := k.scan(ctx)
	switch {
	case err == nil:
		k.pause = 0
		k.retry.Stop()
		return
	case ctx.Err() != nil:
		return
	case k.pause == 0:
		k.pause = rescanLate
		k.s.log.Warn("look for connections of ended keys", "error", err)
	default:
		k.pause = min(2*k.pause, rescanEvery)
		k.s.log.Debug("look for connections of ended keys", "error", err, "again in", k.pause)
	}
	k.retry.Reset(k.pause)
}

// cutQueued cuts the connections of the keys that were revoked meanwhile, so that one scan serves all.
func (k *kicker) cutQueued(ctx context.Context) {
	for {
		select {
		case key := <-k.keys:
			k.cutLinks(ctx, key)
		default:
			return
		}
	}
}

// cutLinks cuts the connections of one key that this replica let in.
func (k *kicker) cutLinks(ctx context.Context, key Key) {
	for _, at := range k.s.links.take(key.PublicKey) {
		// One that has gone by itself is an error of the server's, and the usual case.
		if err := k.cut(ctx, at); err != nil {
			k.s.log.Debug("cut a connection", "key", key.ID, "client", at.client, "error", err)
		}
	}
}

// scan cuts every connection on the own server whose key has ended. One whose leaf has is left to the replica that has its link at first,
// which tells the runner so and closes it, and asked for once more: a scan may come at any time, and between a revocation and the goodbye
// too, also when this process stands still there (SPEC C9).
func (k *kicker) scan(ctx context.Context) error {
	server := k.s.c.Sys.ConnectedServerId()
	if server == "" {
		return errors.New("not connected")
	}
	ends := make(map[string]int, len(k.leafEnds))
	var failed []error
	for offset := 0; ; offset += connzPage {
		page, err := k.connections(ctx, server, offset)
		if err != nil {
			maps.Copy(k.leafEnds, ends) // what it has found stays found
			return errors.Join(append(failed, err)...)
		}
		for _, c := range page {
			if !k.ended(c) {
				continue
			}
			if leaf := c.leaf(); leaf != "" {
				told, known := k.leafEnds[leaf]
				if !known {
					told = k.late.ask()
				}
				if ends[leaf] = told; told > k.late.done {
					continue
				}
			}
			if err := k.cut(ctx, link{server: server, client: c.Client}); err != nil {
				failed = append(failed, err)
				continue
			}
			k.s.log.Info("connection of an ended key was cut", "user", c.User, "client", c.Client)
		}
		if len(page) < connzPage {
			k.leafEnds = ends
			return errors.Join(failed...)
		}
	}
}

// connection is what is read of an entry of CONNZ.
type connection struct {
	Client uint64    `json:"cid"`
	User   string    `json:"authorized_user"`
	Start  time.Time `json:"start"`
	Tags   []string  `json:"tags"`
}

// leaf is the fingerprint of the leaf that a dialled runner's connection was let in with; empty for another connection.
func (c connection) leaf() string {
	for _, tag := range c.Tags {
		if fingerprint, ok := strings.CutPrefix(tag, leafTag); ok {
			return fingerprint
		}
	}
	return ""
}

// ended reports whether the key of a runner's connection may not be connected any more.
func (k *kicker) ended(c connection) bool {
	if leaf := c.leaf(); leaf != "" {
		return k.leafEnded(c, leaf)
	}
	for _, tag := range c.Tags {
		public, ok := strings.CutPrefix(tag, keyTag)
		if !ok {
			continue
		}
		key, err := k.s.a.KeyByPublic(public)
		if err != nil && key.PublicKey == "" {
			return k.s.a.Fresh() && time.Since(c.Start) > unknownGrace
		}
		return err != nil
	}
	return false // the control plane's own
}

func (k *kicker) connections(ctx context.Context, server string, offset int) ([]connection, error) {
	var answer struct {
		Data struct {
			Connections []connection `json:"connections"`
		} `json:"data"`
		Error *sysError `json:"error"`
	}
	query := map[string]any{"auth": true, "acc": placeRun.account(), "limit": connzPage, "offset": offset}
	if err := k.ask(ctx, server, "CONNZ", query, &answer); err != nil {
		return nil, err
	}
	if answer.Error != nil {
		return nil, answer.Error
	}
	return answer.Data.Connections, nil
}

func (k *kicker) cut(ctx context.Context, at link) error {
	var answer struct {
		Error *sysError `json:"error"`
	}
	if err := k.ask(ctx, at.server, "KICK", map[string]uint64{"cid": at.client}, &answer); err != nil {
		return err
	}
	if answer.Error != nil {
		return answer.Error
	}
	return nil
}

// sysError is an error in the answer of a server.
type sysError struct {
	Code        int    `json:"code"`
	Description string `json:"description"`
}

func (e *sysError) Error() string { return fmt.Sprintf("server: %s (%d)", e.Description, e.Code) }

func (k *kicker) ask(ctx context.Context, server, call string, query, answer any) error {
	body, err := json.Marshal(query)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, sysTimeout)
	defer cancel()
	msg, err := k.s.c.Sys.RequestWithContext(ctx, "$SYS.REQ.SERVER."+server+"."+call, body)
	if err != nil {
		return fmt.Errorf("%s: %w", call, err)
	}
	if err := json.Unmarshal(msg.Data, answer); err != nil {
		return fmt.Errorf("%s: %w", call, err)
	}
	return nil
}
