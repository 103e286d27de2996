package proc

import (
	"fmt"
	"io"
)

// Out is where figures are printed to. If nobody reads them any more, they are lost.
type Out struct{ W io.Writer }

// Printf prints as fmt.Fprintf does.
func (o Out) Printf(format string, args ...any) { _, _ = fmt.Fprintf(o.W, format, args...) }
