package source

import (
	"errors"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// An output of batches hands them on as they are, and cuts them at the limits like any other.
func TestBatchOutput(t *testing.T) {
	mem := checked(t)
	var rows []int64
	o := NewBatchOutput(func(batch arrow.RecordBatch) error {
		rows = append(rows, batch.NumRows())
		return nil
	}, Limits{MaxRows: 15}, nil)
	if err := o.Start(pairSchema); err != nil {
		t.Fatal(err)
	}
	if err := write(t, o, pairs(mem, 0, 10, 3)); err != nil {
		t.Fatal(err)
	}
	if err := write(t, o, pairs(mem, 10, 10, 3)); !errors.Is(err, ErrLimit) {
		t.Fatalf("over the limit: %v", err)
	}
	if err := o.Close(); err != nil {
		t.Fatal(err)
	}
	if len(rows) != 2 || rows[0] != 10 || rows[1] != 5 || o.Rows() != 15 {
		t.Errorf("batches of %v rows, %d in all", rows, o.Rows())
	}
	if n := o.Notices(); len(n) != 1 || n[0].GetCode() != runbusv1.NoticeCode_NOTICE_CODE_ROW_LIMIT {
		t.Errorf("notices %v", n)
	}

	full := errors.New("full")
	o = NewBatchOutput(func(arrow.RecordBatch) error { return full }, Limits{}, nil)
	if err := o.Start(pairSchema); err != nil {
		t.Fatal(err)
	}
	if err := write(t, o, pairs(mem, 0, 1, 1)); !errors.Is(err, full) {
		t.Errorf("a failed take gave %v", err)
	}
}
