package httpsource

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash"
	"io"
	"net/url"
	"strconv"
	"strings"

	"github.com/org-runink/runbus/runner/source"
	"github.com/org-runink/runbus/runner/source/tabular"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// pages reads one page after the other into one table.
type pages struct {
	config *config
	client *client
	out    *source.Output
	table  *tabular.Table
	seen   map[string]bool // links and cursors
}

// page is what one page told.
type page struct {
	url    *url.URL
	rows   int64
	link   string // of the header
	sum    string // SHA-256 of its body
	told   json.RawMessage
	number int64
}

// read reads all pages.
func (p *pages) read(ctx context.Context) error {
	p.seen = map[string]bool{}
	u, last := p.first(), ""
	for n := int64(1); ; n++ {
		got, err := p.page(ctx, u, n)
		if err != nil {
			return err
		}
		if p.config.paging == "page" && got.rows > 0 && got.sum == last {
			return schemas.Errorf(schemas.CodeSource, "pages %d and %d of %s are the same", n-1, n, shown(u)).
				WithHint(fmt.Sprintf("does the server know the parameter %q? pageParam sets it", p.config.pageParam))
		}
		last = got.sum
		next, err := p.next(got)
		if err != nil || next == nil {
			return err
		}
		if n == p.config.maxPages {
			p.out.Notice(runbusv1.NoticeCode_NOTICE_CODE_SOURCE, fmt.Sprintf("the result was cut after maxPages=%d pages: the source may have more", n))
			return nil
		}
		u = next
	}
}

// first is the URL of the first page.
func (p *pages) first() *url.URL {
	if p.config.paging == "page" {
		return withParam(p.config.url, p.config.pageParam, strconv.FormatInt(p.config.pageStart, 10))
	}
	p.seen[p.config.url.String()] = true
	return p.config.url
}

// page reads one page into the table.
func (p *pages) page(ctx context.Context, u *url.URL, n int64) (*page, error) {
	what := "querying " + shown(u)
	if p.config.paging != "none" {
		what = fmt.Sprintf("page %d of %s", n, shown(u))
	}
	if p.out.Rows() == 0 {
		p.out.Phase(runbusv1.Phase_PHASE_QUERYING, what)
	} else {
		p.out.Phase(runbusv1.Phase_PHASE_STREAMING, what)
	}
	a, err := p.client.get(ctx, u)
	if err != nil {
		return nil, err
	}
	defer a.close()
	got := &page{url: a.url, link: nextLink(a.header.Values("Link")), number: n}
	body := &hashed{r: a.body}
	if p.config.paging == "page" {
		body.sum = sha256.New()
	}
	part := shown(u)
	if p.config.paging != "none" {
		part = fmt.Sprintf("page %d of %s", n, part)
	}
	if got.rows, got.told, err = p.parse(ctx, part, body); err != nil {
		return nil, err
	}
	got.sum = body.hex()
	return got, nil
}

// parse reads a body. A wholly empty one has no rows.
func (p *pages) parse(ctx context.Context, part string, body *hashed) (rows int64, told json.RawMessage, err error) {
	switch p.config.format {
	case tabular.CSV:
		rows, err = p.table.ReadCSV(ctx, part, body)
	case tabular.JSONLines:
		rows, err = p.table.ReadJSONLines(ctx, part, body)
	default:
		if empty, err := body.empty(); err != nil || empty {
			return 0, nil, err
		}
		var captures []*tabular.Capture
		for _, path := range []tabular.Path{p.config.nextPath, p.config.cursorPath} {
			if len(path) > 0 {
				captures = append(captures, &tabular.Capture{Path: path})
			}
		}
		rows, err = p.table.ReadJSON(ctx, part, body, captures...)
		if len(captures) > 0 {
			told = captures[0].Raw
		}
	}
	if err == nil {
		_, err = io.Copy(io.Discard, body) // the end of it, so that the connection can be used again
	}
	return rows, told, err
}

// next is the URL of the page after got; nil: it was the last one.
func (p *pages) next(got *page) (*url.URL, error) {
	switch p.config.paging {
	case "page":
		if got.rows == 0 {
			return nil, nil
		}
		return withParam(p.config.url, p.config.pageParam, strconv.FormatInt(p.config.pageStart+got.number, 10)), nil
	case "link":
		link := got.link
		if len(p.config.nextPath) > 0 {
			var err error
			if link, err = scalar(got.told, p.config.nextPath); err != nil {
				return nil, err
			}
		}
		if link == "" {
			return nil, nil
		}
		u, err := p.client.next(got.url, link, "next link")
		if err != nil {
			return nil, err
		}
		return u, p.once(u.String(), "link", got)
	case "cursor":
		cursor, err := scalar(got.told, p.config.cursorPath)
		if err != nil || cursor == "" {
			return nil, err
		}
		return withParam(p.config.url, p.config.cursorParam, cursor), p.once(cursor, "cursor", got)
	}
	return nil, nil
}

// once refuses a link or cursor that was there before: the pages would go round for ever.
func (p *pages) once(s, what string, got *page) error {
	key := s
	if len(key) > 64 {
		sum := sha256.Sum256([]byte(s))
		key = string(sum[:])
	}
	if p.seen[key] {
		return schemas.Errorf(schemas.CodeSource, "page %d of %s has a next %s that was there before: the pages go round", got.number, shown(got.url), what)
	}
	p.seen[key] = true
	return nil
}

// scalar is a link or cursor in the body: a text or a number. null, false, "" and absent mean that there is none.
func scalar(raw json.RawMessage, path tabular.Path) (string, error) {
	switch {
	case raw == nil || raw[0] == 'n' || raw[0] == 'f':
		return "", nil
	case raw[0] == '"':
		var s string
		if err := json.Unmarshal(raw, &s); err != nil {
			return "", schemas.Errorf(schemas.CodeSource, "the text at %s is not valid", path)
		}
		return s, nil
	case raw[0] == '-' || raw[0] >= '0' && raw[0] <= '9':
		return string(raw), nil
	}
	return "", schemas.Errorf(schemas.CodeSource, "the value at %s is neither a text nor a number", path)
}

// withParam is u with one query parameter set; the others stay as they are, in their order.
func withParam(u *url.URL, name, value string) *url.URL {
	next := *u
	var keep []string
	for pair := range strings.SplitSeq(u.RawQuery, "&") {
		key, _, _ := strings.Cut(pair, "=")
		if plain, err := url.QueryUnescape(key); pair != "" && (err != nil || plain != name) {
			keep = append(keep, pair)
		}
	}
	next.RawQuery = strings.Join(append(keep, url.QueryEscape(name)+"="+url.QueryEscape(value)), "&")
	return &next
}

// hashed is a body that can be hashed and asked whether it is empty.
type hashed struct {
	r    io.Reader
	sum  hash.Hash
	head []byte
}

// empty looks at the first byte.
func (h *hashed) empty() (bool, error) {
	b := make([]byte, 1)
	n, err := io.ReadFull(h.r, b)
	h.head = b[:n]
	if err == io.EOF {
		return true, nil
	}
	return false, err
}

func (h *hashed) Read(p []byte) (n int, err error) {
	if len(h.head) > 0 {
		n = copy(p, h.head)
		h.head = h.head[n:]
	} else {
		n, err = h.r.Read(p)
	}
	if h.sum != nil {
		h.sum.Write(p[:n])
	}
	return n, err
}

func (h *hashed) hex() string {
	if h.sum == nil {
		return ""
	}
	return hex.EncodeToString(h.sum.Sum(nil))
}
