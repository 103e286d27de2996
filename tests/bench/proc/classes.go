package proc

import "runtime/metrics"

// Classes is what the memory of a child's Go runtime is used for, in bytes. Memory that was returned to the system is not in it, and
// neither is the program itself.
type Classes struct {
	Objects uint64 `json:"objects"` // live, or garbage that is not collected yet
	Unused  uint64 `json:"unused"`  // room between objects
	Free    uint64 `json:"free"`    // not returned yet
	Stacks  uint64 `json:"stacks"`
	Other   uint64 `json:"other"` // the runtime's own
}

// Classes reads the child's.
func (c *Child) Classes() (m Classes, err error) {
	err = c.Ask("classes", &m)
	return m, err
}

func readClasses() (c Classes) {
	var total, released uint64
	into := map[string]*uint64{
		"/memory/classes/heap/objects:bytes": &c.Objects, "/memory/classes/heap/unused:bytes": &c.Unused,
		"/memory/classes/heap/free:bytes": &c.Free, "/memory/classes/heap/stacks:bytes": &c.Stacks,
		"/memory/classes/total:bytes": &total, "/memory/classes/heap/released:bytes": &released,
	}
	var samples []metrics.Sample
	for name := range into {
		samples = append(samples, metrics.Sample{Name: name})
	}
	metrics.Read(samples)
	for _, s := range samples {
		*into[s.Name] = s.Value.Uint64()
	}
	c.Other = total - released - c.Objects - c.Unused - c.Free - c.Stacks
	return c
}

// Sub is what c has more than o.
func (c Classes) Sub(o Classes) Classes {
	return Classes{c.Objects - o.Objects, c.Unused - o.Unused, c.Free - o.Free, c.Stacks - o.Stacks, c.Other - o.Other}
}
