package runner

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// A renewal that this host can't store is told in the runner's log with its cause, which is where the control plane sends people; that
// itself hears nothing of the host's files.
func TestTheLogTellsWhyARenewalFailed(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	newRunnerCA(t).enrol(t, dir, time.Hour)
	store := openStore(t, dir)
	t.Cleanup(func() { must(t, store.Close()) })
	must(t, os.RemoveAll(dir)) // as a folder that can't be written, for whatever user this is

	var log bytes.Buffer
	a := &Agent{log: slog.New(slog.NewTextHandler(&log, nil)), dialled: &dialled{store: store, renewals: newRenewals(store)}}
	reply, err := a.dialled.renewals.obey(&runbusv1.RunnerControl{Id: "1", Order: &runbusv1.RunnerControl_Renew{Renew: &runbusv1.RenewOrder{}}})
	a.tellRenewal(reply, err)
	for _, want := range []string{"level=WARN", "a renewal of the certificate failed", "state folder: ", "no such file or directory"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("the log lacks %q: %s", want, &log)
		}
	}
	if told := reply.GetError().GetMessage(); err == nil || told == "" || strings.Contains(told, dir) || len(reply.GetCsrDer()) > 0 {
		t.Errorf("the control plane is told %v", reply)
	}
}
