package bus

import runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"

// What the hello of a runner lists of what not every runner knows.
const (
	// CapabilityAssignments: it reads RunnerWorkAssignments.
	CapabilityAssignments = "assignments"
	// CapabilityXXH3: where the assignment says so, its checksum of a result is XXH3 over all of it.
	CapabilityXXH3 = "xxh3"
	// CapabilityChunksTell: where the assignment says so, it sends no STREAMING progress with its first chunk.
	CapabilityChunksTell = "chunks-tell"
	// CapabilityWhole: where the assignment says so, it may send a small dispatch as one RunnerWorkWhole.
	CapabilityWhole = "whole"
	// CapabilitySettled: it reads RunnerWorkAssignments.settled.
	CapabilitySettled = "settled"
)

// Abilities are a runner's own, of those that change what it is sent. The zero value is a runner that knows none.
type Abilities struct{ Assignments, XXH3, ChunksTell, Whole, Settled bool }

// AbilitiesOf reads the capabilities of a hello.
func AbilitiesOf(capabilities []string) (a Abilities) {
	for _, c := range capabilities {
		switch c {
		case CapabilityAssignments:
			a.Assignments = true
		case CapabilityXXH3:
			a.XXH3 = true
		case CapabilityChunksTell:
			a.ChunksTell = true
		case CapabilityWhole:
			a.Whole = true
		case CapabilitySettled:
			a.Settled = true
		}
	}
	return a
}

// Scheme is how the checksum of a stream is made for a runner with these abilities, when the assignment asks for what they allow.
func (a Abilities) Scheme() Scheme {
	if a.XXH3 {
		return SchemeXXH3
	}
	return SchemeHead
}

// SchemeOf is how the checksum of the stream is made that the assignment asks for.
func SchemeOf(m *runbusv1.RunnerWorkAssignment) Scheme {
	switch {
	case m.GetXxh3Whole():
		return SchemeXXH3
	case m.GetXxh3():
		return SchemeHead
	}
	return SchemeSHA256
}
