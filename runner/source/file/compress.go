package file

import (
	"compress/gzip"
	"errors"
	"io"

	"github.com/klauspost/compress/zstd"

	"github.com/org-runink/runbus/schemas"
)

// maxWindow bounds the memory that a zstd frame may ask for.
const maxWindow = 128 << 20

// decompressed calls fn with the plain text of r. Errors of the compression are the file's.
func decompressed(compression, name string, r io.Reader, fn func(io.Reader) error) error {
	var plain io.Reader
	switch compression {
	case "gzip":
		z, err := gzip.NewReader(r)
		if err != nil {
			return damaged(name, compression, err)
		}
		plain = z
	case "zstd":
		z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return damaged(name, compression, err)
		}
		defer z.Close()
		plain = z
	default:
		return fn(r)
	}
	watch := &watched{r: plain}
	err := fn(watch)
	if err != nil && watch.err != nil && errors.Is(err, watch.err) {
		return damaged(name, compression, watch.err)
	}
	return err
}

// watched remembers what reading ended with.
type watched struct {
	r   io.Reader
	err error
}

func (w *watched) Read(p []byte) (int, error) {
	n, err := w.r.Read(p)
	if err != nil && err != io.EOF {
		w.err = err
	}
	return n, err
}

func damaged(name, compression string, err error) error {
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return schemas.Errorf(schemas.CodeSource, "%s: can't decompress as %s: %w", name, compression, err).
		WithHint("set compression=none if the file is not compressed")
}
