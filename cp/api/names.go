package api

import (
	"encoding/json"
	"net/http"
	"strings"

	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// phaseName is a phase as this API writes it: `streaming`.
func phaseName(p runbusv1.Phase) string { return enumName(p.String(), "PHASE_") }

// noticeName is a notice code as this API writes it: `row_limit`.
func noticeName(c runbusv1.NoticeCode) string { return enumName(c.String(), "NOTICE_CODE_") }

func enumName(name, prefix string) string { return strings.ToLower(strings.TrimPrefix(name, prefix)) }

// writeProblem answers outside of huma's own error path.
func writeProblem(w http.ResponseWriter, p *Problem) error {
	if p.Status == http.StatusUnauthorized {
		return writeUnauthorized(w)
	}
	b, err := json.Marshal(p)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", p.ContentType(""))
	w.WriteHeader(p.Status)
	_, err = w.Write(append(b, '\n'))
	return err
}

// writeUnauthorized is the one answer to a missing or bad credential (SPEC R6).
func writeUnauthorized(w http.ResponseWriter) error {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("WWW-Authenticate", `Bearer realm="runbus"`)
	w.WriteHeader(http.StatusUnauthorized)
	_, err := w.Write([]byte(`{"error":"unauthorized"}`))
	return err
}
