package source

import (
	"encoding/binary"

	flatbuffers "github.com/google/flatbuffers/go"
)

// batchMetadata writes the messages of batches. It keeps the last one and puts other numbers in where the next has the same shape: building
// one anew is a twentieth of what a result of 1 KB costs the runner (measured). Not safe for concurrent use.
type batchMetadata struct {
	builder *flatbuffers.Builder
	kept    []byte
	// The shape of kept, and where its numbers are.
	nodes, buffers                     int
	compressed                         bool
	rowsAt, bodyAt, nodesAt, buffersAt flatbuffers.UOffsetT
}

// message is the metadata of a message with the batch, compressed or not, and a body of so many bytes. It is valid until the next call.
func (m *batchMetadata) message(b recordBatch, body int64, compressed bool) []byte {
	if b.rows == 0 || body == 0 {
		return b.message(m.builder, body, compressed) // flatbuffers leaves a 0 out
	}
	if m.kept == nil || m.nodes != len(b.nodes) || m.buffers != len(b.buffers) || m.compressed != compressed {
		m.keep(b, body, compressed)
		return m.kept
	}
	m.put(m.rowsAt, b.rows)
	m.put(m.bodyAt, body)
	m.extents(m.nodesAt, b.nodes)
	m.extents(m.buffersAt, b.buffers)
	return m.kept
}

// keep builds the message of a batch, and finds its numbers.
func (m *batchMetadata) keep(b recordBatch, body int64, compressed bool) {
	m.kept = append(m.kept[:0], b.message(m.builder, body, compressed)...)
	m.nodes, m.buffers, m.compressed = len(b.nodes), len(b.buffers), compressed
	message := flatbuffers.Table{Bytes: m.kept, Pos: flatbuffers.GetUOffsetT(m.kept)}
	batch := flatbuffers.Table{Bytes: m.kept}
	message.Union(&batch, field(&message, messageHeader))
	m.bodyAt = message.Pos + field(&message, messageBodyLength)
	m.rowsAt = batch.Pos + field(&batch, batchLength)
	m.nodesAt = batch.Vector(field(&batch, batchNodes))
	m.buffersAt = batch.Vector(field(&batch, batchBuffers))
}

func (m *batchMetadata) put(at flatbuffers.UOffsetT, n int64) {
	binary.LittleEndian.PutUint64(m.kept[at:], uint64(n))
}

func (m *batchMetadata) extents(at flatbuffers.UOffsetT, list []extent) {
	for _, e := range list {
		m.put(at, e.offset)
		m.put(at+8, e.length)
		at += extentBytes
	}
}
