package cp

import (
	"context"

	"github.com/org-runink/runbus/cp/dispatch"
)

// Fetch makes a fetch for a caller in this process, the bearer of a session token: sink gets what the API would send. Caller in req is
// filled in here. An error is that of the token; what goes wrong with the fetch is in its Outcome.
func (c *ControlPlane) Fetch(ctx context.Context, token string, req dispatch.Request, sink dispatch.Sink) (dispatch.Outcome, error) {
	caller, err := c.auth.Authenticate(token)
	if err != nil {
		return dispatch.Outcome{}, err
	}
	req.Caller = caller
	return c.dispatch.Fetch(ctx, req, "", sink), nil
}
