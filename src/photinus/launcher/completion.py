"""`photinus completion bash|zsh|fish`: a script that completes commands, flags and their values in that shell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .command_line.usage import UsageError, closest

__all__ = ["main"]

_SHELLS = ("bash", "zsh", "fish")

HELP = """\
usage: photinus completion bash|zsh|fish

Prints a script that lets the shell complete photinus commands and their flags.

  bash   add to ~/.bashrc:   eval "$(photinus completion bash)"
  zsh    add to ~/.zshrc:    eval "$(photinus completion zsh)"
  fish   photinus completion fish > ~/.config/fish/completions/photinus.fish"""

# `-o default`: where nothing of ours fits, file names, as for the script of `photinus run`.
_BASH = """\
_photinus() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands} --help --version"
  else
    case "${{COMP_WORDS[1]}} $before" in
{values}
      *)
        case "$word" in
          -*)
            case "${{COMP_WORDS[1]}}" in
{flags}
            esac ;;
        esac ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _photinus photinus
"""


def main(arguments: Sequence[str]) -> int:
    """Prints the script for a shell.

    Raises:
        UsageError: no shell is named, or one that is not known.
    """
    if not arguments or arguments[0] in ("--help", "-h"):
        print(HELP)
        return 0 if arguments else 2
    shell = arguments[0]
    if shell not in _SHELLS or len(arguments) > 1:
        near = closest(shell, _SHELLS)
        hint = f" Did you mean {near}?" if near and near != shell else ""
        raise UsageError(f"photinus completion {' '.join(arguments)}: needs one of bash, zsh, fish.{hint}")
    print(_fish() if shell == "fish" else _zsh() if shell == "zsh" else _bash(), end="")
    return 0


def _flags() -> Mapping[str, Mapping[str, Sequence[str]]]:
    """Command -> flag -> the words that may follow it ([] for none, or any)."""
    from . import again
    from .bench.options import BACKENDS, DTYPES, OPERATIONS, VALUED
    from .command_line import flags
    from .doctor import examine
    from .new import FLAGS, TEMPLATES
    from .viewing.page import make
    from .viewing.top import watch

    known = {"--ops": OPERATIONS, "--backends": BACKENDS, "--dtype": tuple(DTYPES)}
    return {
        "run": {name: ("auto", "gpu", "cpu") if name == "--nproc-per-node" else () for name in flags.FLAGS},
        "new": {name: tuple(TEMPLATES) if name == "--template" else () for name in FLAGS},
        "again": dict.fromkeys(again.FLAGS, ()),
        "doctor": dict.fromkeys(examine.FLAGS, ()),
        "bench": {name: known.get(name, ()) for name in (*VALUED, "--json", "--help")},
        "top": dict.fromkeys(watch.FLAGS, ()),
        "report": dict.fromkeys(make.FLAGS, ()),
        "completion": dict.fromkeys(_SHELLS, ()),
    }


def _bash() -> str:
    known = _flags()
    values = [
        f'      "{command} {name}") words="{" ".join(words)}" ;;'
        for command, of_command in known.items()
        for name, words in of_command.items()
        if words
    ]
    values.append(f'      "completion completion") words="{" ".join(_SHELLS)}" ;;')
    listed = [
        f'              {command}) words="{" ".join(of_command)}" ;;'
        for command, of_command in known.items()
        if command != "completion"
    ]
    return _BASH.format(commands=" ".join(known), values="\n".join(values), flags="\n".join(listed))


def _zsh() -> str:
    return "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n" + _bash()


def _fish() -> str:
    lines = []
    known = _flags()
    for command, of_command in known.items():
        lines.append(f"complete -c photinus -n __fish_use_subcommand -f -a {command}")
        for name, words in of_command.items():
            only = f'complete -c photinus -n "__fish_seen_subcommand_from {command}"'
            if not name.startswith("-"):
                lines.append(f"{only} -f -a {name}")
                continue
            spelling = f"-l {name[2:]}" if name.startswith("--") else f"-o {name[1:]}"
            lines.append(f"{only} {spelling}" + (f' -x -a "{" ".join(words)}"' if words else ""))
    return "\n".join(lines) + "\n"
