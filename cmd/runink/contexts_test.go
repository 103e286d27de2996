package main

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
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

// A file system whose locks are not served keeps no context from being saved; what else is wrong with a lock does.
func TestLocksThatAreNotServed(t *testing.T) {
	for _, c := range []struct {
		says []error
		want error
	}{
		{[]error{nil}, nil},
		{[]error{syscall.EINTR, syscall.EINTR, nil}, nil},
		{[]error{syscall.ENOLCK}, nil},
		{[]error{syscall.EINTR, syscall.ENOSYS}, nil},
		{[]error{syscall.EOPNOTSUPP}, nil},
		{[]error{syscall.EINTR, syscall.EBADF}, syscall.EBADF},
	} {
		says := c.says
		err := locked(func() (err error) {
			err, says = says[0], says[1:]
			return err
		})
		if !errors.Is(err, c.want) || len(says) > 0 {
			t.Errorf("%v: %v, and %v was not asked for", c.says, err, says)
		}
	}
}

// Of many that remove a context at once one does: the name is looked for when no other command may change what is kept.
func TestAContextIsRemovedOnce(t *testing.T) {
	t.Setenv("HOME", t.TempDir())
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	if err := saveContext("c", endpoint{URL: "http://127.0.0.1:1", Token: schemas.NewSessionToken()}, true); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	var removed atomic.Int32
	for range 16 {
		all.Go(func() {
			if removeContext("c") == nil {
				removed.Add(1)
			}
		})
	}
	all.Wait()
	if n := removed.Load(); n != 1 {
		t.Errorf("%d commands have removed it", n)
	}
}
