package api

import (
	"net/http"
	"strconv"
	"strings"

	"github.com/org-runink/runbus/schemas"
)

// The media types in which a fetch answers.
const (
	mediaNDJSON = "application/x-ndjson"
	mediaArrow  = "application/vnd.apache.arrow.stream"
	mediaCSV    = "text/csv"
)

// negotiate picks the media type of Accept with the highest weight in which a fetch can answer, of equal ones the first (RFC
// 9110, 12.5.1). None is 406; an empty Accept is NDJSON.
func negotiate(accept string) (string, error) {
	if strings.TrimSpace(accept) == "" {
		return mediaNDJSON, nil
	}
	best, most := "", 0.0
	for part := range strings.SplitSeq(accept, ",") {
		media, parameters, _ := strings.Cut(part, ";")
		if weight := weightOf(parameters); weight > most {
			if name := answerTo(strings.ToLower(strings.TrimSpace(media))); name != "" {
				best, most = name, weight
			}
		}
	}
	if best == "" {
		return "", newProblem(http.StatusNotAcceptable, schemas.CodeInvalid, "Accept names no media type that a fetch can answer in",
			"use application/x-ndjson, application/vnd.apache.arrow.stream or text/csv")
	}
	return best, nil
}

// answerTo is the media type that answers to a range of Accept; "" if none does.
func answerTo(media string) string {
	switch media {
	case mediaNDJSON, "*/*", "application/*", "application/json":
		return mediaNDJSON
	case mediaArrow:
		return mediaArrow
	case mediaCSV, "text/*":
		return mediaCSV
	}
	return ""
}

// weightOf is the q among the parameters, 1 if there is none; one that is no number from 0 to 1 excludes the media type.
func weightOf(parameters string) float64 {
	for p := range strings.SplitSeq(parameters, ";") {
		name, value, _ := strings.Cut(strings.TrimSpace(p), "=")
		if !strings.EqualFold(strings.TrimSpace(name), "q") {
			continue
		}
		q, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if err != nil || !(q >= 0 && q <= 1) {
			return 0
		}
		return q
	}
	return 1
}
