package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/org-runink/runbus/runner"
)

// configuration is what the doctor says of the settings of a runner that is dialled and not enrolled, for which it ends with status 1.
func configuration(t *testing.T, args ...string) runner.Check {
	t.Helper()
	a := app()
	var out bytes.Buffer
	a.Writer = &out
	err := a.Run(append([]string{"core-runner", "doctor", "--json", "--state-dir", t.TempDir()}, args...))
	var d runner.Diagnosis
	if jerr := json.Unmarshal(out.Bytes(), &d); jerr != nil || len(d.Checks) == 0 || runner.ExitCode(err) != runner.ExitFailed {
		t.Fatalf("%v, %v: %s", jerr, err, out.String())
	}
	return d.Checks[0]
}

// The doctor takes the flags of the command that starts the runner, and refuses the settings with which that would not start.
func TestDoctorTakesWhatServeTakes(t *testing.T) {
	if c := configuration(t, "--listen", "127.0.0.1:17443"); c.Verdict != runner.CheckOK || !strings.Contains(c.Saw, "at 127.0.0.1:17443") {
		t.Errorf("%+v", c)
	}
	if c := configuration(t, "--listen", "17443"); c.Verdict != runner.CheckFail || c.Todo == "" {
		t.Errorf("%+v", c)
	}
	t.Setenv("LOG_LEVEL", "loud")
	if c := configuration(t); c.Verdict != runner.CheckFail || c.Saw != `LOG_LEVEL is "loud": use debug, info, warn or error` || c.Todo == "" {
		t.Errorf("%+v", c)
	}
}
