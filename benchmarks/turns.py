"""Contestants that are alive together and take turns: while one runs, all others sleep in a read from a pipe."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import contestant

DTYPES = {"float32": 4, "bfloat16": 2}
"""Element types and their bytes."""
QUIET = 0.1
"""The share of the cores that others may use in a quiet moment."""


class Contestant(contestant.Contestant):
    """An implementation with its ranks, and the figures that it gives.

    Args:
        name: for the report.
        columns: the figures: name of the column -> path that its ranks know it by.
        commands, ranks: what to start.
        dtypes: the element types that it knows.
        smallest_bytes: column -> sizes below are left out: there the figure means nothing.
        more: see `contestant.Contestant`.
    """

    def __init__(
        self,
        name: str,
        columns: dict[str, str],
        commands: contestant.Commands,
        ranks: int,
        *,
        dtypes: Sequence[str] = ("float32", "bfloat16"),
        smallest_bytes: dict[str, int] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(name, commands, ranks, **more)
        self.columns, self.dtypes, self.smallest_bytes = columns, dtypes, smallest_bytes or {}

    def prepare(self, dtype: str, size_bytes: int) -> bool:
        """Makes tensors; False when it has none of this kind, or is gone."""
        return dtype in self.dtypes and super().prepare(dtype, size_bytes)


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds in which all take turns, and how long a turn lasts, or how many calls it has.

    With `wait_quiet_s`, each round waits at most so long for the rest of the machine to be idle. Contestants make what
    they work on anew in each round, unless that takes long and pages decide little. A turn has at least two calls,
    or `fewest` where one call lasts ten turns.
    """

    rounds: int = 7
    turn_s: float = 0.1
    fixed_calls: int = 0
    wait_quiet_s: float = 0
    prepare_each_round: bool = True
    fewest: int = 2

    def calls(self, time_one: Callable[[int], float | None]) -> int:
        """How many calls fill a turn."""
        if self.fixed_calls:
            return self.fixed_calls
        first = time_one(1)
        if first is None:
            return 0
        if first > 10 * self.turn_s:
            return self.fewest
        second = time_one(max(1, int(self.turn_s / 5 / first)))
        return max(2, min(20_000, int(self.turn_s / second))) if second else 0


def busy_share(seconds: float) -> float:
    """How much of the cores' time is used; while all contestants sleep, that is what others use."""

    def ticks() -> list[int]:
        return [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]

    before = ticks()
    time.sleep(seconds)
    spent = [after - earlier for earlier, after in zip(before, ticks(), strict=True)]
    return 1 - (spent[3] + spent[4]) / max(1, sum(spent))  # all but idle and waiting for disks


def take_turns(
    contestants: Sequence[Contestant], ranks: int, kinds: Sequence[tuple[str, int]], effort: Effort
) -> Iterator[dict[str, Any]]:
    """Starts all contestants and yields a row for each (element type, bytes): median, least and most seconds per call.

    And what rank 0 used besides, the median of each figure of `contestant.used`.

    Those that are absent, or fail on the way, are without figures; `contestant.absent` says why.
    """
    with contextlib.ExitStack() as stack:
        for each in contestants:
            stack.enter_context(each)
        for dtype, size_bytes in kinds:
            turns = [
                (each, column, path)
                for each in contestants
                if each.prepare(dtype, size_bytes)
                for column, path in each.columns.items()
                if size_bytes >= each.smallest_bytes.get(column, 0)
            ]
            yield {"ranks": ranks, "dtype": dtype, "bytes": size_bytes, **_rounds(turns, effort, dtype, size_bytes)}


def _rounds(turns: list[tuple[Contestant, str, str]], effort: Effort, dtype: str, size_bytes: int) -> dict[str, Any]:
    calls = {
        column: effort.calls(lambda count, each=each, path=path: each.run(path, count))  # type: ignore[misc]
        for each, column, path in turns
    }
    times: dict[str, list[float]] = {column: [] for _, column, _ in turns}
    used: dict[str, list[dict[str, float]]] = {column: [] for column in times}
    foreign = []
    for index in range(effort.rounds):
        for each in {id(each): each for each, _, _ in turns}.values() if effort.prepare_each_round else ():
            each.prepare(dtype, size_bytes)  # anew, for some pages are luckier than others
        deadline = time.monotonic() + effort.wait_quiet_s
        while (share := busy_share(0.1)) > QUIET and time.monotonic() < deadline:
            pass
        foreign.append(share)
        first = index % max(1, len(turns))  # nobody always comes after the same one
        for each, column, path in turns[first:] + turns[:first]:
            seconds = each.run(path, calls[column])
            if seconds is not None:
                times[column].append(seconds)
                used[column].append(each.used)
    whole = {column: seconds for column, seconds in times.items() if len(seconds) == effort.rounds}
    return {
        "seconds": {column: statistics.median(seconds) for column, seconds in whole.items()},
        "least": {column: min(seconds) for column, seconds in whole.items()},
        "most": {column: max(seconds) for column, seconds in whole.items()},
        "used": {
            column: {name: statistics.median(each[name] for each in used[column]) for name in used[column][0]}
            for column in whole
        },
        "foreign": round(statistics.mean(foreign), 3),
        "calls": {column: calls[column] for column in whole},
    }
