"""The terminal of a job on several hosts: lines of all hosts, each whole, and the first host's bytes as they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from ..local.output import write_all

_LINE_LIMIT_BYTES = 64 * 1024


@dataclass
class Screen:
    """The destination of stdout or stderr. A write may take as long as a reader pauses (`| less`).

    Attributes:
        gives_up: asked now and then while the reader takes nothing; see `write_all`.
        open_line: the last line that was written has not ended yet.
    """

    target: int
    gives_up: Callable[[], bool] = lambda: False
    open_line: bool = False

    def write(self, data: bytes) -> None:
        """Write the bytes as they are."""
        if data:
            self.open_line = data[-1:] not in (b"\n", b"\r")
            write_all(self.target, data, self.gives_up)

    def write_lines(self, data: bytes) -> None:
        """Write whole lines, on a line of their own."""
        if os.isatty(self.target):
            data = b"\r\x1b[K" + data  # in the place of a progress bar, which draws itself again below
        elif self.open_line:
            data = b"\n" + data
        self.write(data)


@dataclass
class HostLines:
    """One stream of one host on its way to the screen. `first`: the host runs rank 0."""

    screen: Screen
    first: bool
    _pending: bytes = b""

    def take(self, data: bytes) -> None:
        """Write what `data` completes: whole lines."""
        self._pending += data
        # A progress bar goes back to the line's start: up to there nothing is torn.
        end = self._pending.rfind(b"\n") + 1
        if self.first:
            end = max(end, self._pending.rfind(b"\r") + 1)
        if not end and len(self._pending) > _LINE_LIMIT_BYTES:
            self._pending += b"" if self.first else b"\n"
            end = len(self._pending)
        ready, self._pending = self._pending[:end], self._pending[end:]
        if ready:
            (self.screen.write if self.first else self.screen.write_lines)(ready)

    def show_rest(self) -> None:
        """Write the last line, which has no end."""
        rest, self._pending = self._pending, b""
        if self.first:
            self.screen.write(rest)
        elif rest:
            self.screen.write_lines(rest + b"\n")
