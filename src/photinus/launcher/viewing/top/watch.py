"""The command `photinus top`: which run, and how often to look."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Sequence

from ....runlog.run import Run
from ...command_line.flag_values import seconds
from ...command_line.parser import Parser
from ...command_line.usage import UsageError
from ..run_argument import run_folder

__all__ = ["main", "parser"]

_ABOUT = """\
Shows a run while it trains: how far it is, loss and metrics, where the time of
a step goes, each rank's own time, waiting and memory, which rank holds the
others up, and what happened last. It reads the run's folder only, so it may be
started and left at any time, on any host that sees the folder.

RUN is the run's folder (the script's out=... or --out), or a folder with runs
in it, of which the newest is shown. default: the newest below this folder"""
_MORE = """\
keys: q or Ctrl-C leaves.

examples:
  photinus top
  photinus top runs/digits
  photinus top --once | mail -s "how is it going" me

exit code: 0; 2 for wrong use."""


def parser() -> Parser:
    """The command line."""
    made = Parser("top", "[RUN] [--once] [--interval SECONDS]", about=_ABOUT, more=_MORE)
    made.add("runs", metavar="RUN", nargs="*", help=SUPPRESS)
    made.add("--once", action="store_true", help="print it once and end; so it is where the output is no terminal")
    made.add("--interval", metavar="SECONDS", type=_interval, default=1.0, help="how often to look. default: 1")
    return made


def main(arguments: Sequence[str]) -> int:
    """Shows a run until the user leaves; returns the exit code.

    Raises:
        UsageError: wrong words, or no run is there.
    """
    asked = parser().parse(arguments)
    if len(asked.runs) > 1:
        raise UsageError(f"photinus top shows one run, but was given {' and '.join(asked.runs)}.")
    run = Run(run_folder("top", *(asked.runs or [None])))

    from .screen import show

    show(run, once=asked.once, interval_s=asked.interval)
    return 0


def _interval(text: str) -> float:
    if not 0.05 <= seconds(text) <= 3600:
        raise ArgumentTypeError("needs a number of seconds from 0.05 to 3600.")
    return float(text)
