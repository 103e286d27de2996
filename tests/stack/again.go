package stack

import "testing"

// Again calls ask, which runs a command line and returns its exit status and what it printed, and calls it once more if the fetch in it
// ended Late; the test fails if that has no excuse. log is that of the control plane that was asked.
func Again(t testing.TB, log *Lines, ask func() (status int, printed string)) {
	t.Helper()
	from := log.count()
	status, printed := ask()
	if status == 0 || !Late(printed) {
		return
	}
	id, err := lateDispatch(log, from)
	if err != nil {
		t.Fatalf("%v: %s", err, printed)
	}
	Excuse(t, id, printed)
	ask()
}
