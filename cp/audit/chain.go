package audit

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"

	"google.golang.org/protobuf/encoding/protojson"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

const (
	// maxBatchBytes bounds the text of one batch, and thus its stored form.
	maxBatchBytes = 480 << 10
	// maxBatchEvents bounds how many events are in one batch.
	maxBatchEvents = 1024
	// batchOverhead is what a batch needs beside its events, at most.
	batchOverhead = 512
	// tellOverhead is what the event needs that tells of dropped notes, at most.
	tellOverhead = 512
	// maxWriter bounds the name of a writer.
	maxWriter = 64
	// maxEventBytes bounds one event, so that any event fits into a batch of its own.
	maxEventBytes = 128 << 10
)

// BrokenError says that the chain of stored batches does not hold: one was changed, removed, inserted or moved.
type BrokenError struct {
	Number uint64 // of the batch where it shows
	Why    string
}

func (e *BrokenError) Error() string {
	return fmt.Sprintf("the audit chain is broken at batch %d: %s", e.Number, e.Why)
}

// chain is the end of a chain of stored batches. The zero chain is the empty one.
type chain struct {
	number uint64 // of the last batch
	sum    string // hex SHA-256 of its stored bytes; "" for none
}

// append appends the text of the batch that comes next. Each of events is one, or several with commas between them.
func (c chain) append(body []byte, writer string, events [][]byte) ([]byte, error) {
	size := batchOverhead
	for _, e := range events {
		size += len(e) + 1
	}
	body, err := c.appendHead(slices.Grow(body, size), writer)
	if err != nil {
		return nil, err
	}
	for i, e := range events {
		if i > 0 {
			body = append(body, ',')
		}
		body = append(body, e...)
	}
	return append(body, batchEnd...), nil
}

// around is append for the events that begin at batchOverhead in memory, without moving them: it writes the head before them and the
// end behind them, and may move all if memory has no room for the end. The memory is the same in its length and in its events. ok is
// false if the head is too long.
func (c chain) around(memory []byte, writer string) (body []byte, ok bool, err error) {
	head, err := c.appendHead(make([]byte, 0, batchOverhead), writer)
	if err != nil || len(head) > batchOverhead {
		return nil, false, err
	}
	begin := batchOverhead - len(head)
	copy(memory[begin:], head)
	return append(memory, batchEnd...)[begin:], true, nil
}

// batchEnd is what stands behind the events of a batch.
const batchEnd = `]}`

// appendHead appends what stands before the events of the batch that comes next.
func (c chain) appendHead(body []byte, writer string) ([]byte, error) {
	// protobuf JSON, in which a uint64 is text.
	body = strconv.AppendUint(append(body, `{"number":"`...), c.number+1, 10)
	body = append(body, '"')
	if c.sum != "" {
		body = append(append(append(body, `,"previous":"`...), c.sum...), '"')
	}
	body, err := appendText(append(body, `,"writer":`...), writer)
	if err != nil {
		return nil, fmt.Errorf("encode an audit batch: %w", err)
	}
	return append(body, `,"events":[`...), nil
}

// next verifies that body, stored as message seq, is the batch that comes next, and moves the chain behind it. It returns
// an *BrokenError, and the chain stays, if it is not. In the stream of one chain a batch's number is its sequence.
func (c *chain) next(seq uint64, body []byte) (*runbusv1.AuditBatch, error) {
	want := c.number + 1
	if seq != want {
		return nil, &BrokenError{Number: want, Why: fmt.Sprintf("it is missing; message %d follows", seq)}
	}
	batch, err := decodeBatch(body)
	if err != nil {
		return nil, &BrokenError{Number: want, Why: "it does not decode: " + err.Error()}
	}
	if batch.GetNumber() != want {
		return nil, &BrokenError{Number: want, Why: fmt.Sprintf("the batch in its place has number %d", batch.GetNumber())}
	}
	if batch.GetPrevious() != c.sum {
		return nil, &BrokenError{Number: want, Why: "it does not continue the batch before it"}
	}
	*c = after(batch.GetNumber(), body)
	return batch, nil
}

// after is the chain that ends with the batch of this number and these stored bytes.
func after(number uint64, body []byte) chain {
	sum := sha256.Sum256(body)
	return chain{number: number, sum: hex.EncodeToString(sum[:])}
}

// decodeBatch reads stored bytes.
func decodeBatch(body []byte) (*runbusv1.AuditBatch, error) {
	text, err := Text(body)
	if err != nil {
		return nil, err
	}
	batch := &runbusv1.AuditBatch{}
	// Fields of a later version are no damage: the chain is over the bytes.
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(text, batch); err != nil {
		return nil, err
	}
	return batch, nil
}
