package auth

import (
	"encoding/json"
	"log/slog"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/org-runink/runbus/jetstream"
)

// A person that this replica made, and another one removed, stays removed, in whatever order the two are heard of here: the watch may bring
// the removal before the replica has taken in what it wrote itself.
func TestARemovalIsNotOvertaken(t *testing.T) {
	person := personRecord{Tenant: "acme", Name: "rita", Role: RoleReader, Generation: "g"}
	body, err := json.Marshal(person)
	must(t, err)
	made := jetstream.Row[record]{Key: person.key(), Value: body, Revision: 10}
	removed := jetstream.Row[record]{Key: person.key(), Revision: 11, Deleted: true}
	again := jetstream.Row[record]{Key: person.key(), Value: body, Revision: 12}
	for _, rows := range [][]jetstream.Row[record]{{made, removed}, {removed, made}, {made, removed, made}} {
		d := newDirectory(slog.New(slog.DiscardHandler))
		for _, row := range rows {
			d.apply(row)
		}
		if people := d.peopleOf("acme"); len(people) != 0 {
			t.Errorf("%+v are there after %+v", people, rows)
		}
		d.apply(again)
		if people := d.peopleOf("acme"); len(people) != 1 {
			t.Errorf("who was made again is not there: %+v", people)
		}
	}
}

// Each login removes sessions that have ended, and none has the key of another: nothing of them stays, nor does what was removed come back
// for as long as an older row of it may come.
func TestRemovedSessionsLeaveNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		body, err := json.Marshal(sessionRecord{Tenant: "acme", Person: "rita"})
		must(t, err)
		d := newDirectory(slog.New(slog.DiscardHandler))
		const kept, made = "kept", 10_000
		d.apply(jetstream.Row[record]{Key: sessionKey(kept), Value: body, Revision: 1})
		d.deleted(sessionKey(kept), 1)
		d.apply(jetstream.Row[record]{Key: sessionKey(kept), Value: body, Revision: 2}) // made again
		revision := uint64(2)
		for i := range made {
			key := sessionKey(strconv.Itoa(i))
			revision += 2
			made := jetstream.Row[record]{Key: key, Value: body, Revision: revision}
			d.apply(made)
			if i%2 == 0 { // by this replica, which hears of it too, or by another
				d.deleted(key, revision)
			}
			d.apply(jetstream.Row[record]{Key: key, Revision: revision + 1, Deleted: true})
			<-time.After(underWay / 100)
			if d.apply(made); len(d.sessions) != 1 {
				t.Fatalf("session %d came back", i)
			}
		}
		if len(d.revisions) > 102 || len(d.tombs) > 203 || cap(d.tombs) > 2000 {
			t.Errorf("of %d sessions %d revisions and %d removals stay, in room for %d", made, len(d.revisions), len(d.tombs), cap(d.tombs))
		}
		if d.revision(sessionKey(kept)) != 2 {
			t.Error("one that was made again is forgotten")
		}
	})
}
