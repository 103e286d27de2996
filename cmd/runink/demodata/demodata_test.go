package demodata_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/csv"
	"encoding/hex"
	"os"
	"strconv"
	"testing"

	"github.com/org-runink/runbus/cmd/runink/demodata"
)

// The file is the one whose provenance is written down, and it says of itself what it holds.
func TestTheFileIsTheOneDescribed(t *testing.T) {
	text, err := os.ReadFile("PROVENANCE.md")
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(demodata.CSV)
	if !bytes.Contains(text, []byte(hex.EncodeToString(sum[:]))) {
		t.Errorf("PROVENANCE.md does not name the file's SHA-256 %x", sum)
	}
	rows, err := csv.NewReader(bytes.NewReader(demodata.CSV)).ReadAll()
	if err != nil || len(rows) != demodata.Rows+1 {
		t.Fatalf("%d records, %v", len(rows), err)
	}
	for i, r := range rows[1:] {
		if r[0] != strconv.Itoa(i+1) {
			t.Fatalf("element %d is in row %d", i+1, i)
		}
	}
}
