"""The command `photinus top`: which run, how often to look, and on what to draw."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live

from ....runlog.run import Run
from ...command_line.usage import UsageError, closest
from ..run_argument import run_folder
from .view import view

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
    console = Console(highlight=False, markup=False, emoji=False)
    if options.once or not (console.is_terminal and sys.stdin.isatty()) or console.is_dumb_terminal:
        with console.capture() as printed:
            console.print(_picture(run, console, None))
        text = "\n".join(line.rstrip() for line in printed.get().splitlines())
        # In a locale of ASCII a picture with question marks is better than none.
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding))
        return 0
    with contextlib.suppress(KeyboardInterrupt):  # a way to leave like any other
        _watch(run, console, options.interval_s)
    return 0


def _picture(run: Run, console: Console, height: int | None) -> Group:
    run.refresh()
    colour = console.color_system is not None and not console.no_color
    return view(run, width=console.width, height=height, now_s=time.time(), colour=colour)


def _watch(run: Run, console: Console, interval_s: float) -> None:
    """Shows the run on the terminal's second page; whatever ends it, the terminal is left as it was found."""

    def on_end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_end)
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)  # keys come at once and are not echoed; Ctrl-C stays a signal
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                size = console.size
                live.update(_picture(run, console, size.height), refresh=True)
                deadline = time.monotonic() + interval_s
                while time.monotonic() < deadline and console.size == size:
                    if _is_leaving(min(0.25, max(0.0, deadline - time.monotonic()))):
                        return
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _is_leaving(timeout_s: float) -> bool:
    """Whether the user types q, or the terminal is gone, within so many seconds."""
    if not select.select([sys.stdin], [], [], timeout_s)[0]:
        return False
    typed = os.read(sys.stdin.fileno(), 64)
    return not typed or bool(set(b"qQ\x03\x04") & set(typed))


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
