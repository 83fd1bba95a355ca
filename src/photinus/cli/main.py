"""The `photinus` command: finds the subcommand and shows help.

Each subcommand is a module with `main(arguments) -> exit code`, imported when it is used. `main` raises
UsageError for words that cannot be carried out, and another PhotinusError for what failed. Nothing here imports torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from ..errors import UsageError
from ..run.exit_code import exit_code_of, run_as_process
from ..version import __version__
from ..words import hint

COMMANDS = {
    "run": ("photinus.cli.run", "start a script on all devices of this host; restart on failure"),
    "new": ("photinus.cli.new", "create a small project to start from"),
    "doctor": ("photinus.tools.doctor.examine", "check what works on this machine"),
    "bench": ("photinus.tools.bench", "measure collectives over each backend, and what limits them"),
    "top": ("photinus.tools.view.top", "show a run while it trains: progress, loss, where the time goes"),
    "report": ("photinus.tools.view.report", "write one HTML page about a run, or several to compare"),
    "verify": ("photinus.tools.verify", "compare two runs bit by bit: the first step and parameter that differ"),
    "export": ("photinus.compat.export", "write a run's weights as a safetensors file"),
}

_HELP = f"""\
photinus {__version__}: train one PyTorch model on many devices

usage: photinus COMMAND ...

commands:
{chr(10).join(f"  {name:<12}{meaning}" for name, (_, meaning) in COMMANDS.items())}

  --help, --version

examples:
  photinus run train.py                       one process per GPU (or core)
  photinus run --nproc-per-node 2 train.py --epochs 3
  photinus new digits                         a project to start from
  photinus doctor                             which backends work here?
  photinus bench                              which backend is fastest here?
  photinus top                                live progress; which rank is slow?
  photinus report runs/digits                 curves, times, options: one page
  photinus verify runs/a runs/b               do they have the same bits?
  photinus run --help"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `photinus` with these words and returns the exit code.

    Without words it is the command itself: it takes those of the command line, and leaves the process.
    """
    if arguments is not None:
        return exit_code_of(partial(_dispatch, list(arguments)), name=arguments[0] if arguments else "")
    _open_closed_streams()
    words = sys.argv[1:]
    return run_as_process(partial(_dispatch, words), name=words[0] if words else "")


def _open_closed_streams() -> None:
    """Puts /dev/null where a standard stream is closed (`>&-`, some daemons): the next file would get its number."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
            setattr(sys, name, open(descriptor, mode))  # noqa: SIM115 - for as long as the process lives


def _check_folder() -> None:
    """Refuse a working directory that was removed, and perhaps made again, since the shell went there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        was = os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
        advice = f"cd {was}, which exists again" if os.path.isdir(was) else "cd to one that exists"
        raise UsageError(f"the working directory ({was}) was removed. Change to another: {advice}.") from None


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    if not words or words[0] in ("--help", "-h", "help"):
        print(_HELP)
        return 0
    if words[0] in ("--version", "-V", "version"):
        print(f"photinus {__version__}")
        return 0
    if words[0] not in COMMANDS:
        _refuse(words[0])
    _check_folder()
    module, _ = COMMANDS[words[0]]
    code: int = importlib.import_module(module).main(words[1:])
    return code


def _refuse(word: str) -> NoReturn:
    if word.startswith("-"):
        text = f"unknown flag {word}. Put flags after the command: photinus run {word} ...; see `photinus --help`."
    elif word.endswith(".py"):
        text = f"{word} is not a command. To start it: photinus run {word}"
    else:
        text = f"unknown command {word}." + hint(word, COMMANDS, " See `photinus --help`.")
    raise UsageError(text)
