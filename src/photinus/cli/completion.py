"""`photinus completion bash|zsh|fish`: a script that completes commands, flags and their values in that shell."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

import shtab

from .main import COMMANDS
from .parser import Parser

_SHELLS = ("bash", "zsh", "fish")
_FILES = ("FILE", "FILE.html", "DIR", "RUN")
_MORE = """\
  bash   add to ~/.bashrc:   eval "$(photinus completion bash)"
  zsh    add to ~/.zshrc:    eval "$(photinus completion zsh)"
  fish   photinus completion fish > ~/.config/fish/completions/photinus.fish"""


def parser() -> Parser:
    """The command line."""
    about = "Print a script that lets the shell complete photinus commands and their flags."
    parser = Parser("completion", "|".join(_SHELLS), about=about, more=_MORE)
    parser.add("shell", f"one of {', '.join(_SHELLS)}", metavar="SHELL", one_of=_SHELLS)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Prints the script for a shell."""
    shell = parser().parse(arguments).shell
    root = argparse.ArgumentParser("photinus")
    root.add_argument("--version", action="version", version="")
    below = root.add_subparsers()
    for name, (module, meaning) in COMMANDS.items():
        of_command: Parser = importlib.import_module(module).parser()
        if of_command.passes_on:
            of_command.add("words", "", metavar="FILE", nargs=argparse.REMAINDER)
        for action in [*of_command.flags.values(), *of_command.words]:
            offered = of_command.offered.get((action.option_strings or [action.dest])[0])
            if offered:
                action.choices = offered
            elif action.metavar in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        below.add_parser(name, parents=[of_command], add_help=False, help=meaning)
    print(shtab.complete(root, shell))
    return 0
