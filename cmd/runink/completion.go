package main

import (
	"fmt"

	"github.com/urfave/cli/v2"
)

// The scripts ask this binary with the words as they are: nothing typed is ever evaluated by the shell.
const (
	bashCompletion = `_runink() {
  local words=("${COMP_WORDS[@]:0:COMP_CWORD}") cur="${COMP_WORDS[COMP_CWORD]}" line
  [[ $cur == -* ]] && words+=("$cur")
  COMPREPLY=()
  while IFS= read -r line; do
    [[ $line == "$cur"* ]] && COMPREPLY+=("$line")
  done < <("${words[@]}" --generate-bash-completion 2>/dev/null)
}
complete -o bashdefault -o default -F _runink runink
`
	zshCompletion = `#compdef runink
_runink() {
  local -a asked found
  asked=("${(@)words[1,CURRENT-1]}")
  [[ ${words[CURRENT]} == -* ]] && asked+=("${words[CURRENT]}")
  found=("${(@f)$("${asked[@]}" --generate-bash-completion 2>/dev/null)}")
  [[ -n ${found[1]} ]] && compadd -a found || _files
}
compdef _runink runink
`
)

func completionCommand() *cli.Command {
	return &cli.Command{
		Name: "completion", Usage: "print the completion of a shell: bash, zsh or fish", ArgsUsage: "SHELL", HideHelpCommand: true, OnUsageError: onUsage,
		Description:  "bash: source <(runink completion bash)\nzsh:  source <(runink completion zsh)\nfish: runink completion fish | source",
		BashComplete: func(c *cli.Context) { _, _ = fmt.Fprint(c.App.Writer, "bash\nzsh\nfish\n") },
		Action: func(c *cli.Context) error {
			shell, err := oneArg(c, "SHELL")
			if err != nil {
				return err
			}
			text := map[string]string{"bash": bashCompletion, "zsh": zshCompletion}[shell]
			if shell == "fish" {
				if text, err = c.App.ToFishCompletion(); err != nil {
					return err
				}
			}
			if text == "" {
				return usagef("no completion for %q: use bash, zsh or fish", shell)
			}
			_, err = fmt.Fprint(c.App.Writer, text)
			return err
		},
	}
}
