package registry

import "time"

// Policy is what a runner tells of the local policy on its host (SPEC E12), and of its journal: claims, as all it says. Nobody here
// can change either.
type Policy struct {
	// Digest is the SHA-256 of the policy's normal form; empty when there is none, and all but cloud metadata is allowed.
	Digest     string   `json:"digest"`
	Default    string   `json:"default"` // `allow` or `deny`
	AllowRules int      `json:"allowRules"`
	DenyRules  int      `json:"denyRules"`
	RuleNames  []string `json:"ruleNames"`
	// Journal is true when the runner records every fetch on its host; JournalHead is `number:SHA256` of the last record there at the
	// time of the hello, which `core-runner journal verify --expect` takes.
	Journal     bool   `json:"journal"`
	JournalHead string `json:"journalHead,omitempty"`
}

// Record is the value of a runner's key in the heartbeats bucket (SPEC E7). The compare-and-set on it decides which process
// holds the runner's id; the key expires 60 s after the last heartbeat. Name, Version, Capabilities, LoadScore, Limit,
// InFlight and Pid are the runner's own statements.
type Record struct {
	Tenant       string   `json:"tenant"`
	Runner       string   `json:"runner"`
	Name         string   `json:"name"`
	Version      string   `json:"version"`
	Capabilities []string `json:"capabilities"`
	LoadScore    float64  `json:"loadScore"`
	Limit        int      `json:"limit"`
	InFlight     int      `json:"inFlight"`
	Draining     bool     `json:"draining"`
	Pid          int64    `json:"pid"`
	Policy       *Policy  `json:"policy,omitempty"`

	// Session is 128 random bits in hex. It stays the same as long as the process does.
	Session   string    `json:"session"`
	SessionAt time.Time `json:"sessionAt"`
	// ProcessNonce is the process that holds the id; Replaced are those that lost it, newest last, which never get it back.
	ProcessNonce string   `json:"processNonce"`
	Replaced     []string `json:"replaced,omitempty"`
	PublicKey    string   `json:"publicKey"`
	KeyID        string   `json:"keyId"`
	// SealingKey is the HPKE public key that the hello signed, in a record of a version that kept it here: now it is in a bucket of its own.
	SealingKey []byte `json:"sealingKey,omitempty"`

	StartedAt time.Time `json:"startedAt"`
	// LastSeen is the last hello or heartbeat, by the clock of Replica.
	LastSeen time.Time `json:"lastSeen"`
	// Replica is the control-plane replica that wrote this value.
	Replica string `json:"replica"`
	// Ready is false until the first heartbeat of the session: from then on the runner may get work.
	Ready bool `json:"ready"`
	// Beat is the number of the last heartbeat that counted; 0 if its runner numbers none.
	Beat uint64 `json:"beat,omitempty"`
	// Left is set by a goodbye; the key stays until it expires, so that every replica learns of it.
	Left       bool   `json:"left,omitempty"`
	LeftReason string `json:"leftReason,omitempty"`
}

// Known is the value of a runner's key in the known bucket: it keeps a runner that is away `runner_offline` rather than
// `runner_unknown` (SPEC E8), and binds its id to a key (SPEC E4).
type Known struct {
	Tenant  string `json:"tenant"`
	Runner  string `json:"runner"`
	Name    string `json:"name"`
	Version string `json:"version"`
	// PublicKey and KeyID are the service-account key that holds the id; empty after an admin released it.
	PublicKey string `json:"publicKey"`
	KeyID     string `json:"keyId"`
	// FirstSeen is the first hello under this id. LastSeen is coarse: it is written at most once a minute.
	FirstSeen time.Time `json:"firstSeen"`
	LastSeen  time.Time `json:"lastSeen"`
}
