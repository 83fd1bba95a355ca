"""The command `photinus top`: which run, how often to look, and on what to draw."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ....runlog.run import Run
from ...command_line.usage import UsageError, closest
from ..run_argument import run_folder

__all__ = ["FLAGS", "HELP", "main"]

FLAGS = ("--once", "--interval", "--help")

HELP = """\
usage: photinus top [RUN] [--once] [--interval SECONDS]

Shows a run while it trains: how far it is, loss and metrics, where the time of
a step goes, each rank's own time, waiting and memory, which rank holds the
others up, and what happened last. It reads the run's folder only, so it may be
started and left at any time, on any host that sees the folder.

RUN is the run's folder (the script's out=... or --out), or a folder with runs
in it, of which the newest is shown. default: the newest below this folder

flags:
  --once              print it once and end; so it is where the output is no
                      terminal
  --interval SECONDS  how often to look. default: 1
  --help              this text

keys: q or Ctrl-C leaves.

examples:
  photinus top
  photinus top runs/digits
  photinus top --once | mail -s "how is it going" me

exit code: 0; 2 for wrong use."""


@dataclass(frozen=True)
class _Options:
    folder: str | None
    once: bool
    interval_s: float


def main(arguments: Sequence[str]) -> int:
    """Shows a run until the user leaves; returns the exit code.

    Raises:
        UsageError: wrong words, or no run is there.
    """
    options = _options(list(arguments))
    if options is None:
        print(HELP)
        return 0
    run = Run(run_folder("top", options.folder))
    on_terminal = sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if options.once or not on_terminal:
        _print_once(run)
        return 0
    with contextlib.suppress(KeyboardInterrupt):  # a way to leave like any other
        _watch(run, options.interval_s)
    return 0


def _print_once(run: Run) -> None:
    from .view import view

    width = shutil.get_terminal_size().columns
    run.refresh()
    lines = view(run, width=width, height=None, now_s=time.time(), colour=_colour())
    try:
        print("\n".join(lines))
    except UnicodeEncodeError:  # a locale of ASCII: a picture with question marks is better than none
        print("\n".join(lines).encode("ascii", "replace").decode())


def _watch(run: Run, interval_s: float) -> None:
    from .terminal import terminal
    from .view import view

    colour = _colour()
    with terminal() as screen:
        while True:
            run.refresh()
            width, height = screen.size()
            screen.draw(view(run, width=width, height=height, now_s=time.time(), colour=colour))
            if not screen.wait(interval_s):
                return


def _colour() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def _options(words: list[str]) -> _Options | None:
    """The command line; None for help."""
    folder: str | None = None
    once, interval_s = False, 1.0
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name in ("--help", "-h"):
            return None
        if name == "--once" and not equals:
            once = True
        elif name == "--interval":
            interval_s = _seconds(value if equals else words.pop(0) if words else "")
        elif word.startswith("-"):
            near = closest(name, FLAGS)
            hint = f" Did you mean {near}?" if near else " See `photinus top --help`."
            raise UsageError(f"photinus top does not know {name}.{hint}")
        elif folder is not None:
            raise UsageError(f"photinus top shows one run, but was given {folder} and {word}.")
        else:
            folder = str(Path(word))
    return _Options(folder, once, interval_s)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.05 <= seconds <= 3600:
        raise UsageError(f"--interval {text}".rstrip() + ": needs a number of seconds from 0.05 to 3600.")
    return seconds
