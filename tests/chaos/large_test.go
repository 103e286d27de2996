package chaos

import (
	"bufio"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"net/http"

	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/ipc"
)

// A large result has rows of rowBytes: base64 of random bytes, which no compression makes much smaller than three quarters.
const (
	rowBytes    = 1 << 10
	mediaArrow  = "application/vnd.apache.arrow.stream"
	mediaNDJSON = "application/x-ndjson"
)

// largeTexts draws the texts of a large result one by one: the same for the same marker.
type largeTexts struct {
	random *rand.ChaCha8
	bytes  [rowBytes / 4 * 3]byte
	text   [rowBytes]byte
	sum    hash.Hash
}

func newLargeTexts(marker string) *largeTexts {
	return &largeTexts{random: rand.NewChaCha8(sha256.Sum256([]byte(marker))), sum: sha256.New()}
}

// next is valid until it is called again.
func (l *largeTexts) next() []byte {
	_, _ = l.random.Read(l.bytes[:]) // never fails
	base64.RawStdEncoding.Encode(l.text[:], l.bytes[:])
	l.sum.Write(l.text[:])
	return l.text[:]
}

// writeLarge writes the rows and returns their checksum.
func writeLarge(to io.Writer, marker string, rows int) (string, error) {
	w := bufio.NewWriterSize(to, 64<<10)
	texts := newLargeTexts(marker)
	for i := range rows {
		if _, err := fmt.Fprintf(w, "{\"n\":%d,\"text\":\"%s\"}\n", i, texts.next()); err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(texts.sum.Sum(nil)), w.Flush()
}

// takeArrow reads the answer to a job with a large result: every row is compared with that of the source.
func (j *job) takeArrow(resp *http.Response) {
	j.accepted = true // there is no other answer of this status
	if err := j.takeBatches(resp.Body); err != nil {
		j.broke = err
	}
	_, _ = io.Copy(io.Discard, resp.Body) // up to the trailers, if it ends with them
	if outcome := resp.Trailer.Get("Runbus-Outcome"); outcome != "" {
		j.finals++
		j.final.Outcome, j.final.Message, j.final.Rows = outcome, resp.Trailer.Get("Runbus-Error"), int64(j.got)
	}
	if j.final.Outcome == "completed" && j.broke != nil {
		j.disorder = j.broke.Error()
	}
}

func (j *job) takeBatches(body io.Reader) error {
	reader, err := ipc.NewReader(body)
	if err != nil {
		return err
	}
	defer reader.Release()
	texts := newLargeTexts(j.marker)
	for reader.Next() {
		batch := reader.RecordBatch()
		n, ok := batch.Column(0).(*array.Int64)
		text, isText := batch.Column(1).(*array.String)
		if !ok || !isText {
			return fmt.Errorf("the columns are %v", batch.Schema())
		}
		for i := range int(batch.NumRows()) {
			if want := texts.next(); n.Value(i) != int64(j.got) || text.Value(i) != string(want) {
				return fmt.Errorf("row %d in place %d is not the source's", n.Value(i), j.got)
			}
			j.got++
			if j.each != nil {
				j.each(j.got)
			}
		}
	}
	j.sum = hex.EncodeToString(texts.sum.Sum(nil))
	if err := reader.Err(); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}
