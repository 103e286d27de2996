package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/org-runink/runbus/jetstream"
	"github.com/org-runink/runbus/schemas"
	runbusv1 "github.com/org-runink/runbus/schemas/runbus/v1"
)

// sealingAgain is how often a key that is missing is looked for, once its runner was asked for it.
const sealingAgain = 25 * time.Millisecond

// sealingKey is the value of a runner's key in the bucket of sealing keys: the HPKE public key that the hello of a session signed.
// Which session holds the runner's id is decided by Record alone; a key of another session is none.
type sealingKey struct {
	Session string
	Key     []byte
}

// sealingForm is the first byte of the stored form: the length of the session in a byte, the session, and the key follow.
const sealingForm = 1

// MarshalBinary is the stored form: a key is most of what is held of a runner, and would be a third longer in JSON.
func (k sealingKey) MarshalBinary() ([]byte, error) {
	if len(k.Session) > 255 {
		return nil, fmt.Errorf("a session of %d bytes", len(k.Session))
	}
	b := make([]byte, 0, 2+len(k.Session)+len(k.Key))
	b = append(b, sealingForm, byte(len(k.Session)))
	b = append(b, k.Session...)
	return append(b, k.Key...), nil
}

// UnmarshalBinary reads the stored form. It keeps nothing of b.
func (k *sealingKey) UnmarshalBinary(b []byte) error {
	if len(b) < 2 || b[0] != sealingForm || len(b) < 2+int(b[1]) {
		return errors.New("not a sealing key")
	}
	end := 2 + int(b[1])
	k.Session, k.Key = string(b[2:end]), bytes.Clone(b[end:])
	return nil
}

// keepSealingKey stores the key of the process that has just been given session. Of two processes that say hello at once the loser may
// write last; its key then is of no session, and SealingKey asks the winner for its own.
func (r *Registry) keepSealingKey(ctx context.Context, ref schemas.RunnerRef, session string, key []byte) error {
	at, now := schemas.RunnerKey(ref), sealingKey{session, key}
	_, err := r.sealing.Create(ctx, at, now)
	for range casTries {
		if !errors.Is(err, jetstream.ErrLost) {
			return err
		}
		var row jetstream.Row[sealingKey]
		row, err = r.sealing.Get(ctx, at)
		switch {
		case errors.Is(err, jetstream.ErrNotFound):
			_, err = r.sealing.Create(ctx, at, now)
		case err == nil && row.Value.Session == session && bytes.Equal(row.Value.Key, key):
			return nil
		case err == nil:
			_, err = r.sealing.Update(ctx, at, now, row.Revision)
		}
	}
	return err
}

// SealingKey is the HPKE public key that the hello of ref's session signed; it may not be changed. One that isn't stored, because its
// time to live is over or the bucket was made again, is had from the runner by a hello of the same process, while ctx and the session last.
// The error is of CodeUnavailable.
func (r *Registry) SealingKey(ctx context.Context, ref schemas.RunnerRef, session string) ([]byte, error) {
	if key := r.sealingSeen(ref, session); key != nil {
		return key, nil
	}
	asked := false
	for {
		row, err := r.sealing.Get(ctx, schemas.RunnerKey(ref))
		switch {
		case err == nil && row.Value.Session == session && len(row.Value.Key) > 0:
			r.noteSealing(ref, row.Value)
			return row.Value.Key, nil
		case err != nil && !errors.Is(err, jetstream.ErrNotFound):
			return nil, noSealingKey(ref, err)
		case r.sessionOver(ref, session):
			return nil, noSealingKey(ref, errSessionOver)
		case !asked:
			asked = true
			r.order(ref, session, &runbusv1.RunnerControl{Order: &runbusv1.RunnerControl_Rehello{Rehello: &runbusv1.RehelloOrder{}}})
		}
		select {
		case <-time.After(sealingAgain):
		case <-ctx.Done():
			return nil, noSealingKey(ref, context.Cause(ctx))
		}
	}
}

// errSessionOver is why nobody says hello in a session any more.
var errSessionOver = errors.New("its session is over")

// sessionOver reports whether ref has another session in the view, or its process has left. Whoever watches ref for its loss knows by then.
func (r *Registry) sessionOver(ref schemas.RunnerRef, session string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	rn := r.fleet[ref.Tenant][ref.Runner]
	return rn == nil || rn.rec.Session != session || rn.rec.Left
}

func noSealingKey(ref schemas.RunnerRef, cause error) error {
	return schemas.Wrap(schemas.CodeUnavailable, cause, fmt.Sprintf("the key of runner %q that its credentials are sealed to can't be had now", ref.Runner)).
		WithHint("try again when /readyz is ready")
}

// sealingSeen is the key of session if it was used before, or stands in the record of a version that kept it there; else nil.
func (r *Registry) sealingSeen(ref schemas.RunnerRef, session string) []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	rn := r.fleet[ref.Tenant][ref.Runner]
	switch {
	case rn == nil:
	case rn.sealing != nil && rn.sealing.Session == session:
		return rn.sealing.Key
	case rn.rec.Session == session && len(rn.rec.SealingKey) > 0:
		return rn.rec.SealingKey
	}
	return nil
}

// noteSealing keeps the key of a runner that is given credentials.
func (r *Registry) noteSealing(ref schemas.RunnerRef, key sealingKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if rn := r.fleet[ref.Tenant][ref.Runner]; rn != nil && rn.rec.Session == key.Session {
		rn.sealing = &key
	}
}
