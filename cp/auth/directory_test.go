package auth

import (
	"encoding/json"
	"log/slog"
	"testing"

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
