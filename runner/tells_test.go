package runner

import (
	"context"
	"slices"
	"testing"

	"github.com/org-runink/runbus/runner/source"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Where the control plane takes a first chunk for the progress that rows come, that progress is left out, and nothing else is.
func TestFirstChunkTells(t *testing.T) {
	cp := newControlPlane(t)
	p := cp.start(t, nil, playing(func(_ context.Context, _ source.Request, out *source.Output) error {
		out.Phase(runbusv1.Phase_PHASE_QUERYING, "")
		if err := oneRow(out); err != nil {
			return err
		}
		out.Phase(runbusv1.Phase_PHASE_STREAMING, "half of it")
		return nil
	}))
	for _, tells := range []bool{false, true} {
		c := p.assign(func(m *runbusv1.RunnerWorkAssignment) { m.ChunksTell, m.Bundles = tells, true })
		var got []string
		for ended := false; !ended; {
			f, err := c.Next(t.Context())
			must(t, err)
			switch f := f.(type) {
			case *runbusv1.RunnerWorkProgress:
				u := f.GetUpdate()
				text := u.GetPhase().String()[len("PHASE_"):]
				if u.GetMessage() != "" {
					text += " " + u.GetMessage()
				}
				got = append(got, text)
			case *runbusv1.RunnerWorkChunk:
				got = append(got, "chunk")
			case *runbusv1.RunnerWorkResult:
				ended = true
			}
			c.Done(f)
		}
		first := slices.Index(got, "chunk")
		if first < 0 || !slices.Contains(got, "QUERYING") || !slices.Contains(got, "STREAMING half of it") {
			t.Fatalf("with chunks_tell %v: %q", tells, got)
		}
		if said := slices.Contains(got[:first], "STREAMING"); tells && said || !tells && !slices.Contains(got, "STREAMING") {
			t.Errorf("with chunks_tell %v: %q", tells, got)
		}
	}
}
