package roster

import (
	"context"
	"errors"

	"github.com/org-runink/runbus/jetstream"
)

// Provable reports whether a token's proof key is still there: it went with the memory of a control plane that restarted (SPEC C3), and
// the token is worth nothing since. An error says that it can't be told now.
func (r *Roster) Provable(ctx context.Context, tokenID string) (bool, error) {
	_, err := r.proofs.Get(ctx, tokenID)
	if errors.Is(err, jetstream.ErrNotFound) {
		return false, nil
	}
	return err == nil, err
}
