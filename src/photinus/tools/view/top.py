"""The command `photinus top`: a run printed once, or redrawn in place until the user leaves; the terminal as it was."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import sys
import termios
import time
import tty
from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...cli.flag_values import seconds
from ...cli.parser import Parser
from ...runlog.run import Run, run_folder
from .event_text import command_of, printable

if TYPE_CHECKING:
    from rich.console import Console, Group

_ABOUT = """\
Show a run while it trains: progress, loss and metrics, where the time of a step
goes, each rank's host, pid, times and memory, which rank slows the others down,
and the latest events. It reads only the run's folder. Start and quit it at any
time, on any host that can read the folder.

RUN is the run's folder (out=... or --out of the script), or a folder with runs:
then the newest is shown. default: the newest run below the current folder"""
_MORE = """\
keys: q or Ctrl-C quits.

examples:
  photinus top
  photinus top runs/digits
  photinus top --once | mail -s "how is it going" me

exit code: 0; 2 for wrong use."""


def parser() -> Parser:
    """The command line."""
    parser = Parser("top", "[RUN] [--once] [--interval SECONDS]", about=_ABOUT, more=_MORE)
    parser.add("run", SUPPRESS, metavar="RUN", nargs="?")
    parser.add("--once", "print it once and exit (default if the output is not a terminal)")
    parser.add("--interval SECONDS", "seconds between updates. default: 1", _interval, default=1.0)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Shows a run until the user leaves; returns the exit code."""
    options = parser().parse(arguments)
    _show(Run(run_folder("top", options.run)), once=options.once, interval_s=options.interval)
    return 0


def _interval(text: str) -> float:
    if not 0.05 <= seconds(text) <= 3600:
        raise ArgumentTypeError("needs a number of seconds from 0.05 to 3600.")
    return float(text)


def _show(run: Run, *, once: bool, interval_s: float) -> None:
    """Shows the run; where standard input and output are no terminals, once and in plain text."""
    from rich.console import Console

    # In a locale of ASCII a picture with question marks, each as wide as what it stands for, is better than none.
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    console = Console(highlight=False, markup=False, emoji=False)
    if once or not (console.is_terminal and sys.stdin.isatty()) or console.is_dumb_terminal:
        with console.capture() as printed:
            console.print(_picture(run, console, None))
        print("\n".join(line.rstrip() for line in printed.get().splitlines()))
    else:
        with contextlib.suppress(KeyboardInterrupt):  # a way to leave like any other
            _watch(run, console, interval_s)
    if run.config_starts and run.state(time.time()).word != "running":
        command, folder = command_of(run.config_starts[-1]), run.config_starts[-1].get("folder")
        if command:  # to be pasted into a shell, which goes on with the run
            where = f"cd {shlex.quote(folder)} && " if isinstance(folder, str) else ""
            print(f"started with: {printable(where + command)}")


def _picture(run: Run, console: Console, height: int | None) -> Group:
    from .view import view

    run.refresh()
    colour = console.color_system is not None and not console.no_color
    return view(run, width=console.width, height=height, now_s=time.time(), colour=colour)


def _watch(run: Run, console: Console, interval_s: float) -> None:
    """Shows the run on the terminal's second page; whatever ends it, the terminal is left as it was found."""
    from rich.live import Live

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
    """Return whether the user types q, or the terminal is gone, within so many seconds."""
    if not select.select([sys.stdin], [], [], timeout_s)[0]:
        return False
    typed = os.read(sys.stdin.fileno(), 64)
    return not typed or bool(set(b"qQ\x03\x04") & set(typed))
