"""The output of several hosts on one terminal: the first host's as it comes, the others' in whole lines.

The first host runs rank 0, whose output passes untouched, up to the last end of a line or state of a progress bar.
Lines of other hosts never stand inside one of its lines, nor inside each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from ..workers.output import write_all

_LINE_LIMIT_BYTES = 64 * 1024


@dataclass
class Screen:
    """Where stdout or stderr goes.

    Attributes:
        open_line: what was written last is a line that has not ended yet.
        gives_up: asked now and then while its reader takes nothing; see `write_all`.
    """

    target: int
    open_line: bool = False
    gives_up: Callable[[], bool] = lambda: False

    @property
    def terminal(self) -> bool:
        """Whether it is one."""
        return os.isatty(self.target)

    def write(self, data: bytes) -> None:
        """Writes as it is."""
        if data:
            self.open_line = data[-1:] not in (b"\n", b"\r")
            write_all(self.target, data, self.gives_up)

    def write_lines(self, data: bytes) -> None:
        """Writes whole lines, on a line of their own."""
        if self.terminal:
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
        """More of the stream has come."""
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
        """Shows the line that has not ended, as far as it has come."""
        rest, self._pending = self._pending, b""
        if self.first:
            self.screen.write(rest)
        elif rest:
            self.screen.write_lines(rest + b"\n")
