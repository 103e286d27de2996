package api

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/org-runink/runbus/cp/dispatch"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// Go's client refuses long trailers, so a long error and many notices are shortened rather than lost with the result.
func TestLongTrailersArrive(t *testing.T) {
	var notices []*runbusv1.Notice
	for range 100 {
		notices = append(notices, &runbusv1.Notice{Code: runbusv1.NoticeCode_NOTICE_CODE_SOURCE, Message: strings.Repeat("n", 300)})
	}
	notices = append([]*runbusv1.Notice{{Code: runbusv1.NoticeCode_NOTICE_CODE_ROW_LIMIT, Message: "the result was cut at 10 rows"}}, notices...)
	for name, message := range map[string]string{"long": strings.Repeat("m", 8<<10), "not ASCII": strings.Repeat("é\x01", 4<<10), "short": "no such table"} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				out := newRowAnswer(w, http.NewResponseController(w), mediaArrow, nil)
				if err := out.Chunk([]byte("arrow")); err != nil {
					t.Error(err)
				}
				if err := out.finish(dispatch.Outcome{
					Code: dispatch.OutcomeFailed, Notices: notices, Err: schemas.Errorf(schemas.CodeSource, "%s", message).WithHint(strings.Repeat("h", 1<<10)),
				}); err != nil {
					t.Error(err)
				}
			}))
			defer server.Close()
			resp, err := server.Client().Get(server.URL)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if err != nil {
				t.Fatal(err)
			}
			var said struct{ Code, Message string }
			if err := json.Unmarshal([]byte(resp.Trailer.Get("Runbus-Error")), &said); err != nil || said.Code != "source_failed" {
				t.Fatalf("Runbus-Error: %v, %+v", err, said)
			}
			if whole := strings.TrimSuffix(said.Message, "…"); whole == "" || !strings.HasPrefix(message, whole) {
				t.Errorf("the message is %q", said.Message)
			}
			var told []noticeLine
			if err := json.Unmarshal([]byte(resp.Trailer.Get("Runbus-Notices")), &told); err != nil || len(told) < 2 || told[0].Code != "row_limit" {
				t.Fatalf("Runbus-Notices: %v, %+v", err, told)
			}
			if string(body) != "arrow" || resp.Trailer.Get("Runbus-Outcome") != "failed" {
				t.Errorf("%q, outcome %q", string(body), resp.Trailer.Get("Runbus-Outcome"))
			}
		})
	}
}
