package embedded

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/nats-io/nkeys"

	"github.com/org-runink/runbus/internal/durable"
	"github.com/org-runink/runbus/schemas"
)

// User is a configured user of the server: a part of the control plane, let in by nkey without the callout.
type User string

// The configured users, each with the account it lives in. What each may do stands in accounts.conf.tmpl.
const (
	UserAuth     User = "auth"     // AUTH: the auth callout
	UserSys      User = "sys"      // SYS: connection events, kick
	UserSec      User = "sec"      // SEC: every bucket and stream
	UserDispatch User = "dispatch" // RUN: sends work, waits for results
	UserServe    User = "serve"    // RUN: serves hello, heartbeat, goodbye
	UserJail     User = "jail"     // JAIL: tells the refused why
	UserMirror   User = "mirror"   // OPS: makes the mirrors
	UserMicro    User = "micro"    // OPS: the micro service, copies of work and control
)

// Users are all configured users.
func Users() []User {
	return []User{UserAuth, UserSys, UserSec, UserDispatch, UserServe, UserJail, UserMirror, UserMicro}
}

// The further keys of the file. Ops and ops-sys are users too, but come by callout.
const (
	keyIssuer = "issuer"
	keyXKey   = "xkey"
	keyOps    = "ops"
	keyOpsSys = "ops-sys"
)

// keysVersion is the version of the file's form.
const keysVersion = 1

// Keys are the private keys of one installation: of the configured users, of the callout and of ops. It is read-only after
// LoadKeys and safe for concurrent use.
type Keys struct {
	pairs map[string]nkeys.KeyPair
}

// keysFile is the JSON form: name of the key to its seed.
type keysFile struct {
	Version int               `json:"version"`
	Seeds   map[string]string `json:"seeds"`
}

// kinds is the prefix that each key must have.
func kinds() map[string]nkeys.PrefixByte {
	k := map[string]nkeys.PrefixByte{
		keyIssuer: nkeys.PrefixByteAccount, keyXKey: nkeys.PrefixByteCurve,
		keyOps: nkeys.PrefixByteUser, keyOpsSys: nkeys.PrefixByteUser,
	}
	for _, u := range Users() {
		k[string(u)] = nkeys.PrefixByteUser
	}
	return k
}

// LoadKeys reads the keys from file, or makes them and the file (mode 0600, whole or not at all) when it doesn't exist. Of
// two processes that make it at once both get the same keys. A file that others may read, that is not a regular file, or
// that is damaged is refused with CodeInvalid, and never made again by itself: the running installation knows these keys.
// No error holds a part of a seed.
func LoadKeys(file string) (*Keys, error) {
	k, err := readKeys(file)
	if !errors.Is(err, fs.ErrNotExist) {
		return k, err
	}
	if err := makeKeys(file); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("make the keys file %s: %w", file, err)
	}
	return readKeys(file)
}

func readKeys(file string) (*Keys, error) {
	info, err := os.Lstat(file)
	if err != nil {
		return nil, fmt.Errorf("read the keys file: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, schemas.Errorf(schemas.CodeInvalid, "the keys file %s is not a regular file", file)
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return nil, schemas.Errorf(schemas.CodeInvalid, "the keys file %s is open to others (mode %04o)", file, mode).
			WithHint("make it private with `chmod 600`, and if somebody else could read it, replace the installation's keys")
	}
	body, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read the keys file: %w", err)
	}
	return parseKeys(file, body)
}

// parseKeys reads the file's content; file is only for the error. The error of the JSON decoder stays out of it: it may
// quote what it read.
func parseKeys(file string, body []byte) (*Keys, error) {
	damaged := func(what string) error {
		return schemas.Errorf(schemas.CodeInvalid, "the keys file %s is damaged: %s", file, what).
			WithHint("restore it from a backup; it is not made again by itself, because the data folder belongs to its keys")
	}
	var f keysFile
	if err := json.Unmarshal(body, &f); err != nil {
		return nil, damaged("it is not valid JSON")
	}
	if f.Version != keysVersion {
		return nil, damaged(fmt.Sprintf("version %d, want %d", f.Version, keysVersion))
	}
	k := &Keys{pairs: make(map[string]nkeys.KeyPair)}
	for name, kind := range kinds() {
		seed, ok := f.Seeds[name]
		if !ok {
			return nil, damaged(fmt.Sprintf("the key %q is missing", name))
		}
		prefix, _, err := nkeys.DecodeSeed([]byte(seed))
		if err != nil || prefix != kind {
			return nil, damaged(fmt.Sprintf("the key %q is not a seed of its kind", name))
		}
		pair, err := pairFromSeed(kind, []byte(seed))
		if err != nil {
			return nil, damaged(fmt.Sprintf("the key %q is not a seed of its kind", name))
		}
		k.pairs[name] = pair
	}
	return k, nil
}

func pairFromSeed(kind nkeys.PrefixByte, seed []byte) (nkeys.KeyPair, error) {
	if kind == nkeys.PrefixByteCurve {
		return nkeys.FromCurveSeed(seed)
	}
	return nkeys.FromSeed(seed)
}

// makeKeys writes a file of new keys. It fails with fs.ErrExist when file is there by then.
func makeKeys(file string) error {
	f := keysFile{Version: keysVersion, Seeds: make(map[string]string)}
	for name, kind := range kinds() {
		pair, err := newPair(kind)
		if err != nil {
			return err
		}
		seed, err := pair.Seed()
		if err != nil {
			return err
		}
		f.Seeds[name] = string(seed)
	}
	body, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return err
	}
	return createPrivate(file, append(body, '\n'))
}

func newPair(kind nkeys.PrefixByte) (nkeys.KeyPair, error) {
	if kind == nkeys.PrefixByteCurve {
		return nkeys.CreateCurveKeys()
	}
	return nkeys.CreatePair(kind)
}

// createPrivate writes body to a new file of mode 0600, and makes its folder. It fails with fs.ErrExist rather than replace a file.
func createPrivate(file string, body []byte) error {
	return errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), durable.Create(file, body, nil))
}

// replacePrivate writes body to a file of mode 0600 in place of the one that may be there, and makes its folder.
func replacePrivate(file string, body []byte) error {
	return errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), durable.Replace(file, body, nil))
}

// Public is the public key of a configured user; "" for an unknown one.
func (k *Keys) Public(u User) string {
	if !slices.Contains(Users(), u) {
		return ""
	}
	return k.public(string(u))
}

// Issuer signs what the callout answers.
func (k *Keys) Issuer() nkeys.KeyPair { return k.pairs[keyIssuer] }

// XKey opens what the server asks the callout, and seals the answer.
func (k *Keys) XKey() nkeys.KeyPair { return k.pairs[keyXKey] }

// OpsPublic is the public key of the ops user.
func (k *Keys) OpsPublic() string { return k.public(keyOps) }

// OpsSysPublic is the public key of the system user of ops.
func (k *Keys) OpsSysPublic() string { return k.public(keyOpsSys) }

// OpsSeed is the seed of the ops user: a secret.
func (k *Keys) OpsSeed() []byte { return k.seed(keyOps) }

// OpsSysSeed is the seed of the system user of ops: a secret.
func (k *Keys) OpsSysSeed() []byte { return k.seed(keyOpsSys) }

// String names the type alone, so that a Keys in a log or an error shows nothing.
func (k *Keys) String() string { return "embedded.Keys" }

// GoString is String, for %#v.
func (k *Keys) GoString() string { return k.String() }

func (k *Keys) public(name string) string {
	pair, ok := k.pairs[name]
	if !ok {
		return ""
	}
	public, err := pair.PublicKey()
	if err != nil {
		return ""
	}
	return public
}

func (k *Keys) seed(name string) []byte {
	seed, err := k.pairs[name].Seed()
	if err != nil {
		return nil
	}
	return seed
}
