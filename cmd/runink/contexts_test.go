package main

import (
	"fmt"
	"sync"
	"testing"

	"github.com/org-runink/runbus/schemas"
)

// Commands that run side by side lose no context of one another: the token in it was shown this once.
func TestContextsThatAreSavedAtOnce(t *testing.T) {
	t.Setenv("HOME", t.TempDir())
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	const many = 16
	var all sync.WaitGroup
	for i := range many {
		all.Go(func() {
			if err := saveContext(fmt.Sprint("c", i), endpoint{URL: "http://127.0.0.1:1", Token: schemas.NewSessionToken()}, false); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	kept, err := loadContexts()
	if err != nil || len(kept.Contexts) != many || kept.Contexts[kept.Current].Token == "" {
		t.Errorf("%d of %d contexts are left, the current one is %q (%v)", len(kept.Contexts), many, kept.Current, err)
	}
}
