package identity

// State is what a state folder says about its runner.
type State int

// The states of a folder.
const (
	Empty    State = iota // nothing was enrolled here: a ticket is needed
	Pending               // an enrolment is under way: a key waits for its certificate
	Enrolled              // there is a certificate, which may have expired
	Revoked               // for good
)

// String is for logs.
func (s State) String() string {
	switch s {
	case Empty:
		return "empty"
	case Pending:
		return "pending"
	case Enrolled:
		return "enrolled"
	case Revoked:
		return "revoked"
	}
	return "unknown"
}
