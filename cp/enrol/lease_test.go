package enrol

import (
	"testing"
	"time"

	"github.com/org-runink/runbus/bus/bustest"
	"github.com/org-runink/runbus/bus/embedded"
	"github.com/org-runink/runbus/jetstream"
)

// C11: of two links of one replica, of which the later takes the place of the other, the later one's record stays: the other would take it back
// when it ends, and another replica would dial a runner that is linked.
func TestTheRecordOfAReplacedLinkIsNotRenewed(t *testing.T) {
	b := bustest.Start(t)
	store, err := jetstream.Open(t.Context(), b.Conn(t, embedded.UserSec), jetstream.Options{Fresh: true, Log: b.Log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	d := &Dialler{d: DiallerDeps{Replica: "a", Log: b.Log}, leases: jetstream.TableOf[Lease](store, jetstream.Leases)}
	began := time.Now().UTC().Round(0) // as it is read
	first, second := Lease{Replica: "a", Since: began}, Lease{Replica: "a", Since: began.Add(time.Minute)}
	elsewhere := Lease{Replica: "b", Since: began.Add(time.Hour)}
	for i, c := range []struct {
		put, stands Lease
	}{{first, first}, {first, first}, {second, second}, {first, second}, {second, second}, {elsewhere, elsewhere}, {second, second}} {
		revision := d.putLease(t.Context(), "r", c.put)
		row, err := d.leases.Get(t.Context(), "r")
		if err != nil {
			t.Fatal(err)
		}
		if row.Value != c.stands || (revision == row.Revision) != (c.put == c.stands) || (revision == 0) == (c.put == c.stands) {
			t.Errorf("%d: of %+v, put at %d, there is %+v at %d", i, c.put, revision, row.Value, row.Revision)
		}
	}
}
