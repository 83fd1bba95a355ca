"""Shows once what several ranks print: `[1-7] text` in place of the same line seven times.

A line waits for a moment, so that other ranks may say the same. Each rank's lines stay in their order: a line joins an
equal one only if its rank has said nothing after that one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass

HOLD_S = 0.25
_MOST_HELD = 2000  # lines; a flood of them is not worth a search


@dataclass
class _Line:
    number: int
    text: bytes
    ranks: set[int]
    since_s: float


class EqualLines:
    """The lines that wait. `ranks`: all that may print; once each of them has said a line, it waits no longer."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self._queue: deque[_Line] = deque()
        self._equal: defaultdict[bytes, deque[_Line]] = defaultdict(deque)  # by text, in their order
        self._last: dict[int, int] = {}  # by rank: the number of its last line
        self._count = 0

    def add(self, rank: int, texts: Iterable[bytes], now_s: float) -> None:
        """Takes lines of a rank, without their ends."""
        for text in texts:
            equal, last = self._equal[text], self._last.get(rank, -1)
            if not equal or equal[-1].number <= last:
                line = _Line(self._count, text, set(), now_s)
                self._count += 1
                self._queue.append(line)
                equal.append(line)
            else:
                line = equal[bisect_right(equal, last, key=lambda each: each.number)]
            line.ranks.add(rank)
            self._last[rank] = line.number

    def due_s(self) -> float | None:
        """When the next line has waited long enough; None when none waits."""
        return self._queue[0].since_s + HOLD_S if self._queue else None

    def take(self, now_s: float, host: str = "") -> bytes:
        """The lines that need not wait any longer, each with its ranks before it; `host` stands before those."""
        parts = []
        while self._queue and self._is_due(self._queue[0], now_s):
            line = self._queue.popleft()
            equal = self._equal[line.text]
            equal.popleft()  # the oldest of all is the oldest of its text
            if not equal:
                del self._equal[line.text]
            where = f"{host}:" if host else ""
            parts.append(f"[{where}{ranges(line.ranks)}] ".encode() + line.text + b"\n")
        return b"".join(parts)

    def _is_due(self, line: _Line, now_s: float) -> bool:
        return line.ranks >= self.ranks or now_s - line.since_s >= HOLD_S or len(self._queue) > _MOST_HELD


def ranges(ranks: Iterable[int]) -> str:
    """Numbers in short: 1-3,5."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)
