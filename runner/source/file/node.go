package file

import (
	"errors"
	"fmt"
	"io"
	"unicode/utf8"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/deprecated"
	"github.com/parquet-go/parquet-go/format"
)

// shape is what a node of a Parquet schema is in Arrow.
type shape uint8

const (
	leafShape shape = iota
	structShape
	listShape
	mapShape
)

const (
	maxDepth  = 64
	maxLeaves = 16384
)

// node is a place in the schema of a Parquet file, with its form in Arrow. LIST, MAP and their legacy forms become lists and
// maps, a repeated field without annotation a list, every other group a struct.
type node struct {
	name     string
	shape    shape
	optional bool
	def      int // definition level at which the value is there
	rep      int // lists, maps: repetition level of a further element
	elemDef  int // lists, maps: definition level at which there is an element
	children []*node
	leaves   []*cursor
	leaf     leaf
}

// columnsOf is the top-level columns of a file.
func columnsOf(f *parquet.File) ([]*node, error) {
	w := &schemaWalk{elements: f.Metadata().Schema}
	root, err := w.next()
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	var top []*node
	for range root.NumChildren.V {
		n, err := w.field(0, 0, 0)
		if err != nil {
			return nil, err
		}
		if seen[n.name] || !utf8.ValidString(n.name) {
			return nil, faultf("the column name %q comes twice or is not UTF-8", n.name)
		}
		seen[n.name] = true
		top = append(top, n)
	}
	if w.at != len(w.elements) {
		return nil, faultf("the schema has %d elements too many", len(w.elements)-w.at)
	}
	return top, nil
}

// schemaWalk reads the flat list of schema elements, depth first.
type schemaWalk struct {
	elements []format.SchemaElement
	at       int
	leaves   int
}

func (w *schemaWalk) next() (*format.SchemaElement, error) {
	if w.at >= len(w.elements) {
		return nil, faultf("the schema ends too early")
	}
	w.at++
	return &w.elements[w.at-1], nil
}

// field reads one field and what is below it. A repeated field that no LIST or MAP announces is a list.
func (w *schemaWalk) field(depth, def, rep int) (*node, error) {
	e, err := w.next()
	if err != nil {
		return nil, err
	}
	if e.RepetitionType.Valid && e.RepetitionType.V == format.Repeated {
		element, err := w.body(e, depth+1, def+1, rep+1)
		if err != nil {
			return nil, err
		}
		return &node{name: e.Name, shape: listShape, def: def, rep: rep + 1, elemDef: def + 1, children: []*node{element}, leaves: element.leaves}, nil
	}
	optional := e.RepetitionType.Valid && e.RepetitionType.V == format.Optional
	if optional {
		def++
	}
	n, err := w.body(e, depth, def, rep)
	if err != nil {
		return nil, err
	}
	n.optional = optional
	return n, nil
}

// body reads an element whose repetition is accounted for.
func (w *schemaWalk) body(e *format.SchemaElement, depth, def, rep int) (*node, error) {
	if depth > maxDepth {
		return nil, faultf("the schema is nested more than %d levels deep", maxDepth)
	}
	if e.NumChildren.V == 0 && e.Type.Valid {
		if w.leaves == maxLeaves {
			return nil, faultf("the schema has more than %d columns", maxLeaves)
		}
		l, err := leafOf(e)
		if err != nil {
			return nil, err
		}
		c := &cursor{column: w.leaves, def: def}
		w.leaves++
		return &node{name: e.Name, def: def, leaf: l, leaves: []*cursor{c}}, nil
	}
	if e.NumChildren.V <= 0 {
		return nil, faultf("the group %q has no fields", e.Name)
	}
	if w.isList(e) || w.isMap(e) {
		return w.repeatedGroup(e, depth, def, rep)
	}
	n := &node{name: e.Name, shape: structShape, def: def}
	for range e.NumChildren.V {
		child, err := w.field(depth+1, def, rep)
		if err != nil {
			return nil, err
		}
		n.children = append(n.children, child)
		n.leaves = append(n.leaves, child.leaves...)
	}
	return n, nil
}

// onlyRepeated is the single child of e if that is repeated.
func (w *schemaWalk) onlyRepeated(e *format.SchemaElement) *format.SchemaElement {
	if e.NumChildren.V != 1 || w.at >= len(w.elements) {
		return nil
	}
	if r := &w.elements[w.at]; r.RepetitionType.Valid && r.RepetitionType.V == format.Repeated {
		return r
	}
	return nil
}

func (w *schemaWalk) isList(e *format.SchemaElement) bool {
	_, list := e.LogicalType.Value.(*format.ListType)
	return (list || converted(e, deprecated.List)) && w.onlyRepeated(e) != nil
}

func (w *schemaWalk) isMap(e *format.SchemaElement) bool {
	_, is := e.LogicalType.Value.(*format.MapType)
	if !is && !converted(e, deprecated.Map) && !converted(e, deprecated.MapKeyValue) {
		return false
	}
	r := w.onlyRepeated(e)
	return r != nil && r.NumChildren.V == 2
}

// repeatedGroup reads what is below a LIST or MAP.
func (w *schemaWalk) repeatedGroup(e *format.SchemaElement, depth, def, rep int) (*node, error) {
	n := &node{name: e.Name, shape: listShape, def: def, rep: rep + 1, elemDef: def + 1}
	isMap := w.isMap(e)
	r, err := w.next() // the repeated child
	if err != nil {
		return nil, err
	}
	switch {
	case isMap:
		n.shape = mapShape
		for range 2 {
			child, err := w.field(depth+2, def+1, rep+1)
			if err != nil {
				return nil, err
			}
			n.children = append(n.children, child)
			n.leaves = append(n.leaves, child.leaves...)
		}
		return n, nil
	case w.isElement(e, r):
		child, err := w.body(r, depth+1, def+1, rep+1)
		if err != nil {
			return nil, err
		}
		n.children, n.leaves = []*node{child}, child.leaves
	default:
		child, err := w.field(depth+2, def+1, rep+1)
		if err != nil {
			return nil, err
		}
		n.children, n.leaves = []*node{child}, child.leaves
	}
	return n, nil
}

// isElement applies the rules for older writers: whether the repeated child of a LIST is the element itself, and not a group
// around it.
func (w *schemaWalk) isElement(list, r *format.SchemaElement) bool {
	if r.NumChildren.V != 1 || r.Name == "array" || r.Name == list.Name+"_tuple" {
		return true
	}
	inner := w.at < len(w.elements) && w.elements[w.at].RepetitionType.Valid && w.elements[w.at].RepetitionType.V == format.Repeated
	return inner
}

func converted(e *format.SchemaElement, c deprecated.ConvertedType) bool {
	return e.LogicalType.Value == nil && e.ConvertedType.Valid && e.ConvertedType.V == c
}

// field is the node as an Arrow field.
func (n *node) field() arrow.Field {
	f := arrow.Field{Name: n.name, Nullable: n.optional, Type: n.leaf.typ, Metadata: n.leaf.metadata}
	switch n.shape {
	case structShape:
		fields := make([]arrow.Field, len(n.children))
		for i, c := range n.children {
			fields[i] = c.field()
		}
		f.Type = arrow.StructOf(fields...)
	case listShape:
		f.Type = arrow.ListOfField(n.children[0].field())
	case mapShape:
		key, item := n.children[0].field(), n.children[1].field()
		m := arrow.MapOfFields(arrow.Field{Name: key.Name, Type: key.Type, Metadata: key.Metadata}, item)
		f.Type = m
	}
	return f
}

// startRow checks that every column below n is at the beginning of a row.
func (n *node) startRow() error {
	for _, c := range n.leaves {
		v, ok, err := c.peek()
		if err != nil {
			return err
		}
		if !ok {
			return errors.New("the values end before the rows do")
		}
		if v.RepetitionLevel() != 0 {
			return errors.New("the repetition levels of its columns disagree")
		}
	}
	return nil
}

// read appends one value of n to its builder and returns the bytes it takes. It reads the values of the leaves by their
// definition and repetition levels.
func (n *node) read(b array.Builder) (int64, error) {
	v, ok, err := n.leaves[0].peek()
	if err != nil {
		return 0, err
	}
	if !ok {
		return 0, io.ErrUnexpectedEOF
	}
	def := v.DefinitionLevel()
	if n.shape == leafShape {
		n.leaves[0].take()
		if def < n.def || v.IsNull() {
			if !n.optional {
				return 0, errors.New("a required value is null")
			}
			b.AppendNull()
			return 1, nil
		}
		return n.leaf.append(b, *v)
	}
	if def < n.def {
		if !n.optional {
			return 0, errors.New("a required value is null")
		}
		b.AppendNull()
		return 1, n.skip()
	}
	switch b := b.(type) {
	case *array.StructBuilder:
		b.Append(true)
		size := int64(0)
		for i, c := range n.children {
			s, err := c.read(b.FieldBuilder(i))
			if err != nil {
				return 0, err
			}
			size += s
		}
		return size, nil
	case *array.ListBuilder:
		b.Append(true)
		return n.elements(def, func() (int64, error) { return n.children[0].read(b.ValueBuilder()) })
	case *array.MapBuilder:
		b.Append(true)
		return n.elements(def, func() (int64, error) {
			if key, ok, err := n.children[0].leaves[0].peek(); err != nil || !ok || key.DefinitionLevel() < n.children[0].def {
				return 0, errors.New("the key of a map is null")
			}
			k, err := n.children[0].read(b.KeyBuilder())
			if err != nil {
				return 0, err
			}
			i, err := n.children[1].read(b.ItemBuilder())
			return k + i, err
		})
	}
	return 0, fmt.Errorf("no builder for %T", b)
}

// elements calls element for each one of a list or map.
func (n *node) elements(def int, element func() (int64, error)) (int64, error) {
	if def < n.elemDef {
		return 4, n.skip() // empty
	}
	size := int64(4)
	for {
		s, err := element()
		if err != nil {
			return 0, err
		}
		size += s
		v, ok, err := n.leaves[0].peek()
		if err != nil {
			return 0, err
		}
		if !ok || v.RepetitionLevel() < n.rep {
			return size, nil
		}
		if v.RepetitionLevel() > n.rep {
			return 0, errors.New("a repetition level is deeper than its list")
		}
	}
}

// skip takes the one value that each leaf has for a null or an empty list.
func (n *node) skip() error {
	for _, c := range n.leaves {
		if _, ok, err := c.peek(); err != nil || !ok {
			return fmt.Errorf("the values of its columns disagree: %w", err)
		}
		c.take()
	}
	return nil
}

// cursor walks the values of one column chunk, page by page.
type cursor struct {
	column int // index among the leaves of the file
	def    int
	pages  parquet.Pages
	page   parquet.Page
	values parquet.ValueReader
	buf    []parquet.Value
	at, n  int
}

func (c *cursor) open(chunk parquet.ColumnChunk) {
	c.pages = chunk.Pages()
	if c.buf == nil {
		c.buf = make([]parquet.Value, 128)
	}
	c.at, c.n = 0, 0
}

// peek is the next value; it stays valid until the one after the next is asked for. False: the chunk has ended.
func (c *cursor) peek() (*parquet.Value, bool, error) {
	for c.at == c.n {
		ok, err := c.fill()
		if !ok || err != nil {
			return nil, false, err
		}
	}
	return &c.buf[c.at], true, nil
}

func (c *cursor) take() { c.at++ }

// fill reads more values. All that were read before have been taken, so their page may go.
func (c *cursor) fill() (bool, error) {
	if c.values == nil {
		page, err := c.pages.ReadPage()
		if err == io.EOF {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		c.page, c.values = page, page.Values()
	}
	n, err := c.values.ReadValues(c.buf)
	c.at, c.n = 0, n
	if err != nil && err != io.EOF {
		return false, err
	}
	if n == 0 {
		parquet.Release(c.page)
		c.page, c.values = nil, nil
	}
	return true, nil
}

func (c *cursor) close() {
	if c.page != nil {
		parquet.Release(c.page)
	}
	if c.pages != nil {
		_ = c.pages.Close() // nothing to lose on reading
	}
	c.pages, c.page, c.values, c.at, c.n = nil, nil, nil, 0, 0
}
