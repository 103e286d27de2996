package bus

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/org-runink/runbus/schemas"
)

// The bound of updates in a RunnerWorkWhole holds before any is made, whoever reads it: an update behind the last that is taken, which is
// no protobuf, is not looked at.
func TestUpdatesAreCountedBeforeTheyAreRead(t *testing.T) {
	const dispatch, session = "d1", "5e551011"
	unknown := appendUint(nil, 999, 1)
	for what, begin := range map[string][]byte{
		"as we write it":         appendIdentity(nil, dispatch, session, 1),
		"with something unknown": append(appendIdentity(nil, dispatch, session, 1), unknown...),
		"in another order":       append(append([]byte{}, unknown...), appendIdentity(nil, dispatch, session, 1)...),
	} {
		for n, want := range map[int]string{mostUpdates: "", mostUpdates + 1: errUpdates().Message} {
			body := append([]byte{}, begin...)
			for range mostUpdates {
				body = appendUpdateBody(body, nil)
			}
			if n > mostUpdates {
				body = appendUpdateBody(body, []byte{0xff})
			}
			err := decodeWhole(body)
			switch {
			case want == "" && err != nil:
				t.Errorf("%s, %d updates: %v", what, n, err)
			case want != "" && (schemas.CodeOf(err) != schemas.CodeInvalid || !strings.Contains(err.Error(), want)):
				t.Errorf("%s, %d updates: %v, want %q", what, n, err, want)
			}
		}
	}
}

func appendUpdateBody(b, body []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, wholeUpdatesNumber, protowire.BytesType), body)
}

func decodeWhole(body []byte) error {
	v, err := viewOf(wholeNumber, body)
	if err != nil {
		return err
	}
	_, err = v.decode(&names{}, &parts{}, len(body), false)
	return err
}
