"""The screen of `photinus top`: redrawn in place on the terminal's second page, and left as it was found.

Whatever ends the command (q, Ctrl-C, SIGTERM, an error), keys echo again, the cursor is back, and what stood on the
terminal before stands there again.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Terminal", "terminal"]

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # the second page, no cursor, no wrapping
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_LEAVING_KEYS = frozenset("qQ\x03\x04")


class Terminal:
    """A terminal that is drawn on; made by `terminal`."""

    def __init__(self, keys: int, screen: int) -> None:
        self._keys, self._screen = keys, screen
        self._drawn: tuple[int, int, tuple[str, ...]] | None = None
        self.resized = False

    def size(self) -> tuple[int, int]:
        """(columns, rows)."""
        try:
            found = os.get_terminal_size(self._screen)
        except OSError:
            return shutil.get_terminal_size()
        # A terminal that does not know its size says 0.
        return found.columns or 80, found.lines or 24

    def draw(self, lines: Sequence[str]) -> None:
        """Puts these lines on the screen, from its top; what stood below them goes."""
        width, height = self.size()
        shown = tuple(lines[:height])
        if (width, height, shown) == self._drawn:
            return
        self._drawn = (width, height, shown)
        # Each line is cleared and written at once. Cleared after it was written, a line as wide as the terminal would
        # lose its last character, on which the cursor stands then.
        text = "\x1b[H" + "\r\n".join(f"\x1b[K{line}" for line in shown) + ("\r\n\x1b[J" if len(shown) < height else "")
        data = text.encode("utf-8", "replace")
        while data:
            data = data[os.write(self._screen, data) :]

    def wait(self, seconds: float) -> bool:
        """Waits for so long, or until the window's size changes. Returns False when the user wants to leave."""
        deadline = time.monotonic() + seconds
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self.resized:
                self.resized = False
                return True
            ready, _, _ = select.select([self._keys], [], [], min(left_s, 0.25))
            if ready:
                typed = os.read(self._keys, 64)
                if not typed or _LEAVING_KEYS & set(typed.decode("latin-1")):
                    return False


@contextmanager
def terminal() -> Iterator[Terminal]:
    """Takes the terminal over, and gives it back however the block ends.

    Standard input and output have to be terminals.
    """
    keys, screen = sys.stdin.fileno(), sys.stdout.fileno()
    sys.stdout.flush()
    before = termios.tcgetattr(keys)
    taken = Terminal(keys, screen)

    def on_resize(number: int, frame: FrameType | None) -> None:
        taken.resized = True

    def on_end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handlers: list[tuple[signal.Signals, Any]] = []
    try:
        for number, handler in ((signal.SIGWINCH, on_resize), (signal.SIGTERM, on_end), (signal.SIGHUP, on_end)):
            handlers.append((number, signal.signal(number, handler)))
        tty.setcbreak(keys)  # keys come at once and are not echoed; Ctrl-C stays a signal
        os.write(screen, _ENTER.encode())
        yield taken
    finally:
        os.write(screen, _LEAVE.encode())
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
        for number, handler in handlers:
            signal.signal(number, handler)
