"""Contestants that are alive together and take turns: while one runs, all others sleep in a read from a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DTYPES = {"float32": 4, "bfloat16": 2}
"""Element types and their bytes."""
QUIET = 0.1
"""The share of the cores that others may use in a quiet moment."""


class ContestantError(Exception):
    """A contestant that can not go on; its text is the reason."""


class Pipes:
    """The command and answer pipes of the ranks of one contestant."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self._commands: list[int] = []
        self._answers: list[int] = []
        self._rests = [b""] * ranks
        for rank in range(ranks):
            for end, files in (("in", self._commands), ("out", self._answers)):
                os.mkfifo(folder / f"{rank}.{end}")
                # Open both ways, so that no open waits for the other side.
                files.append(os.open(folder / f"{rank}.{end}", os.O_RDWR | os.O_CLOEXEC))

    def tell(self, line: str) -> None:
        """Sends a command to all ranks."""
        for file in self._commands:
            os.write(file, f"{line}\n".encode())

    def answers(self, check: Callable[[], None], timeout_s: float) -> list[dict[str, Any]]:
        """One answer of each rank; `check` is asked every second and raises when there is nobody left to answer."""
        deadline = time.monotonic() + timeout_s
        return [self._answer(rank, check, deadline) for rank in range(len(self._answers))]

    def _answer(self, rank: int, check: Callable[[], None], deadline: float) -> dict[str, Any]:
        while b"\n" not in self._rests[rank]:
            if select.select([self._answers[rank]], [], [], 1.0)[0]:
                self._rests[rank] += os.read(self._answers[rank], 4096)
                continue
            check()
            if time.monotonic() > deadline:
                raise ContestantError(f"rank {rank} did not answer in time")
        line, self._rests[rank] = self._rests[rank].split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        for file in (*self._commands, *self._answers):
            os.close(file)


@dataclass
class Contestant:
    """An implementation with its ranks.

    Args:
        name: for the report.
        columns: the figures that it gives: name of the column -> path that its ranks know it by.
        commands: (arguments, environment) of each process to start, given the folder of the pipes.
        dtypes: the element types that it knows.
        smallest_bytes: column -> sizes below are left out: there the figure means nothing.
        absent: why it can not take part; None when it can.
        clean_up: called when all its ranks are ready, and when they have ended.
    """

    name: str
    columns: dict[str, str]
    commands: Callable[[str], list[tuple[list[str], dict[str, str]]]]
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    smallest_bytes: dict[str, int] = field(default_factory=dict)
    absent: str | None = None
    clean_up: Callable[[], None] = lambda: None
    version: str = ""
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _pipes: Pipes | None = None
    _folder: Path = Path()

    def start(self, folder: Path, ranks: int) -> None:
        """Starts the ranks and waits until they have met; a failure is kept as `absent`."""
        if self.absent:
            return
        self._folder = folder
        folder.mkdir()
        self._pipes = Pipes(folder, ranks)
        with open(folder / "log", "wb") as log:
            for arguments, environment in self.commands(str(folder)):
                whole = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
                self._processes.append(
                    subprocess.Popen(arguments, env=whole, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                )
        answers = self._ask(None, 180)
        if answers:
            self.version = str(answers[0]["ready"])
            self.clean_up()

    def prepare(self, dtype: str, size_bytes: int) -> bool:
        """Makes tensors; False when it has none of this kind, or is gone."""
        if self.absent or dtype not in self.dtypes:
            return False
        return bool(self._ask(f"prepare {dtype} {size_bytes}", 60))

    def run(self, path: str, calls: int) -> float | None:
        """Seconds per call, those of the slowest rank; None when it is gone."""
        answers = None if self.absent else self._ask(f"run {path} {calls}", 120)
        return max(float(answer["s"]) for answer in answers) if answers else None

    def stop(self) -> None:
        """Ends the ranks, in order when they can."""
        if self._pipes and not self.absent:
            self._pipes.tell("quit")
        deadline = time.monotonic() + 20
        for process in self._processes:
            if not self.absent:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(0.1, deadline - time.monotonic()))
            if process.poll() is None:
                process.terminate()  # mpirun hands it on to its ranks
                try:
                    process.wait(timeout=5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        if self._pipes:
            self._pipes.close()
        self._processes, self._pipes = [], None
        self.clean_up()

    def _ask(self, line: str | None, timeout_s: float) -> list[dict[str, Any]] | None:
        assert self._pipes
        try:
            if line:
                self._pipes.tell(line)
            return self._pipes.answers(self._check, timeout_s)
        except ContestantError as error:
            self.absent = f"failed at {line or 'start'!r}: {error}"
            self.stop()  # a rank whose peer is gone may spin
            return None

    def _check(self) -> None:
        codes = [process.poll() for process in self._processes]
        if any(code is not None for code in codes):
            log = [line.strip() for line in (self._folder / "log").read_text(errors="replace").splitlines()]
            said = [line for line in log if re.search("error|signal|kill|refuse|abort", line, re.IGNORECASE)]
            last = [line for line in log if re.search("[a-z]", line)]
            raise ContestantError(f"a process ended (codes {codes}): {(said or last or ['it said nothing'])[-1][:300]}")


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds in which all take turns, and how long a turn lasts, or how many calls it has.

    With `wait_quiet_s`, each round waits at most so long for the rest of the machine to be idle. Contestants make what
    they work on anew in each round, unless that takes long and pages decide little.
    """

    rounds: int = 7
    turn_s: float = 0.1
    fixed_calls: int = 0
    wait_quiet_s: float = 0
    prepare_each_round: bool = True

    def calls(self, time_one: Callable[[int], float | None]) -> int:
        """How many calls fill a turn, at least 2."""
        if self.fixed_calls:
            return self.fixed_calls
        first = time_one(1)
        if first is None:
            return 0
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

    Those that are absent, or fail on the way, are without figures; `contestant.absent` says why.
    """
    with tempfile.TemporaryDirectory(prefix="photinus-bench-") as folder:
        try:
            for contestant in contestants:
                contestant.start(Path(folder, contestant.name.replace(" ", "-")), ranks)
            for dtype, size_bytes in kinds:
                turns = [
                    (contestant, column, path)
                    for contestant in contestants
                    if contestant.prepare(dtype, size_bytes)
                    for column, path in contestant.columns.items()
                    if size_bytes >= contestant.smallest_bytes.get(column, 0)
                ]
                yield {"ranks": ranks, "dtype": dtype, "bytes": size_bytes, **_rounds(turns, effort, dtype, size_bytes)}
        finally:
            for contestant in contestants:
                contestant.stop()


def _rounds(turns: list[tuple[Contestant, str, str]], effort: Effort, dtype: str, size_bytes: int) -> dict[str, Any]:
    calls = {
        column: effort.calls(lambda count, contestant=contestant, path=path: contestant.run(path, count))  # type: ignore[misc]
        for contestant, column, path in turns
    }
    times: dict[str, list[float]] = {column: [] for _, column, _ in turns}
    foreign = []
    for index in range(effort.rounds):
        for contestant in {id(each): each for each, _, _ in turns}.values() if effort.prepare_each_round else ():
            contestant.prepare(dtype, size_bytes)  # anew, for some pages are luckier than others
        deadline = time.monotonic() + effort.wait_quiet_s
        while (share := busy_share(0.1)) > QUIET and time.monotonic() < deadline:
            pass
        foreign.append(share)
        first = index % max(1, len(turns))  # nobody always comes after the same one
        for contestant, column, path in turns[first:] + turns[:first]:
            seconds = contestant.run(path, calls[column])
            if seconds is not None:
                times[column].append(seconds)
    whole = {column: seconds for column, seconds in times.items() if len(seconds) == effort.rounds}
    return {
        "seconds": {column: statistics.median(seconds) for column, seconds in whole.items()},
        "least": {column: min(seconds) for column, seconds in whole.items()},
        "most": {column: max(seconds) for column, seconds in whole.items()},
        "foreign": round(statistics.mean(foreign), 3),
        "calls": {column: calls[column] for column in whole},
    }
