package runner

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

// Whatever a connector lets through, no secret leaves in the error of a work.
func TestASecondGateHoldsSecretsBack(t *testing.T) {
	secrets := map[string]string{"password": "correct-horse-battery"}
	for _, c := range []struct {
		err  error
		code schemas.Code
	}{
		{errors.New("dial: password correct-horse-battery refused"), schemas.CodeFailed},
		{fmt.Errorf("wrapped: %w", errors.New("correct-horse-battery")), schemas.CodeFailed},
		{schemas.Errorf(schemas.CodeSource, "FATAL: correct-horse-battery"), schemas.CodeSource},
		{fmt.Errorf("wrapped: %w", schemas.Errorf(schemas.CodeBadSource, "correct-horse-battery")), schemas.CodeBadSource},
	} {
		got := withoutSecrets(c.err, secrets)
		if schemas.CodeOf(got) != c.code || strings.Contains(got.Error(), "horse") || strings.Contains(fmt.Sprintf("%+v", errors.Unwrap(got)), "horse") {
			t.Errorf("%v became %v with code %s", c.err, got, schemas.CodeOf(got))
		}
	}
	if got := withoutSecrets(context.Canceled, secrets); !errors.Is(got, context.Canceled) {
		t.Errorf("a cancelled context became %v", got)
	}
	if withoutSecrets(nil, secrets) != nil {
		t.Error("nil is an error")
	}
}
