"""The terminal: a run printed once, or redrawn in place, with keys, until the user leaves; left as it was found."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty

from rich.console import Console, Group
from rich.live import Live

from ....runlog.run import Run
from .view import view

__all__ = ["show"]


def show(run: Run, *, once: bool, interval_s: float) -> None:
    """Shows the run; where standard input and output are no terminals, once and in plain text."""
    console = Console(highlight=False, markup=False, emoji=False)
    if once or not (console.is_terminal and sys.stdin.isatty()) or console.is_dumb_terminal:
        with console.capture() as printed:
            console.print(_picture(run, console, None))
        text = "\n".join(line.rstrip() for line in printed.get().splitlines())
        # In a locale of ASCII a picture with question marks is better than none.
        encoding = sys.stdout.encoding or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding))
        return
    with contextlib.suppress(KeyboardInterrupt):  # a way to leave like any other
        _watch(run, console, interval_s)


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
