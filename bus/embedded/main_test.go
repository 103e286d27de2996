package embedded

import (
	"testing"

	"github.com/org-runink/runbus/internal/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }
