"""A picture of some steps on all ranks: forward, backward, the exchange of each bucket, and what was waited for.

    with photinus.trace("trace.json", skip=2, steps=5) as trace:    # on every rank
        for x, y in batches:
            ...
    print(trace)

The file is in Chrome's trace event format; chrome://tracing and ui.perfetto.dev open it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ...errors import PhotinusError
from ...optimizer_steps import StepWatcher, unwatch_steps, watch_steps
from ...runlog.events import boot_id
from ..exchange.agreement import gather_per_rank, place_in_group
from .device_clock import Moment
from .recording import EXCHANGE, MAIN, Recording, Span, current_recording, set_current_recording

_SETTLE_S = 5.0


@dataclass
class RankTrace:
    """The spans and times that one rank recorded.

    Attributes:
        rank: in the default group.
        host, pid: where it runs.
        clock: names the clock; ranks with the same one have comparable times.
        meeting_ns: its time when all ranks had met; what the clocks of several hosts are lined up by.
        spans: in the order of their beginnings.
    """

    rank: int
    host: str
    pid: int
    clock: str
    meeting_ns: int
    spans: list[Span]


@dataclass(frozen=True)
class Shares:
    """The time of one rank's steps by its use, in seconds per step.

    Attributes:
        data: waiting for the next batch, in a `photinus.Loop`.
        forward, backward, optimizer: computing.
        exchange: during which at least one bucket was under way.
        exposed: waiting for averages when backward was over.
    """

    rank: int
    steps: int
    data: float
    forward: float
    backward: float
    exchange: float
    exposed: float
    optimizer: float

    def __str__(self) -> str:
        if not self.steps:
            return f"rank {self.rank}: no step was recorded"
        hidden = 1 - min(1.0, self.exposed / self.exchange) if self.exchange else 1.0
        data = f"data {self.data * 1e3:.2f} ms, " if self.data else ""
        return (
            f"rank {self.rank}: {self.steps} steps, each: {data}forward {self.forward * 1e3:.2f} ms, backward "
            f"{self.backward * 1e3:.2f} ms, exchange {self.exchange * 1e3:.2f} ms ({hidden:.0%} of it behind "
            f"backward), waiting for averages {self.exposed * 1e3:.2f} ms, optimizer {self.optimizer * 1e3:.2f} ms"
        )


def trace(path: str | os.PathLike[str], *, skip: int = 0, steps: int | None = None) -> Trace:
    """Record the steps inside `with`, on every rank, into one file.

    A step is a forward of a `photinus.DistributedDataParallel` outside of `no_sync`, and everything until the next one:
    backward, the exchange of each bucket, the wait for averages that backward could not hide, and each step of a
    `torch.optim` optimizer. With a process group, all ranks must enter and exit the block.

    Args:
        path: path of the file, which rank 0 writes at the end. If an exception ends the block, other ranks may be gone,
            so each rank writes its own part to NAME.rankR.json (with one rank: NAME.json).
        skip: number of first steps to leave out. They are slower: buckets are built, memory is touched. Default: 0.
        steps: number of steps to record. Default: all that follow.

    Raises:
        ValueError: skip is below 0, steps is below 1, or the folder does not exist.
        PhotinusError: this process is recording another trace.
    """
    path = Path(path)
    if skip < 0 or (steps is not None and steps < 1):
        raise ValueError(f"skip={skip}, steps={steps}: skip is 0 or more, steps 1 or more (or None for all)")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} into")
    return Trace(path, Recording(skip=skip, steps=steps))


class Trace(AbstractContextManager["Trace"], StepWatcher):
    """The trace of a few steps, as `trace` returns it.

    Attributes:
        path: of the file.
        ranks: on rank 0, after the end: what each rank told. Elsewhere this rank's.
    """

    def __init__(self, path: Path, recording: Recording) -> None:
        self.path = path
        self.ranks: list[RankTrace] = []
        self._recording = recording
        self._optimizer_began: int | Moment = 0

    def __enter__(self) -> Trace:
        if current_recording(any_step=True) is not None:
            raise PhotinusError("a trace is on in this process; end it before the next one begins")
        set_current_recording(self._recording)
        watch_steps(self)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        set_current_recording(None)
        unwatch_steps(self)
        rank, world_size = place_in_group()
        together = world_size > 1 and error is None
        if error is None:
            self._recording.settle(_SETTLE_S)
        if together:
            try:
                dist.barrier()
            except Exception as failure:
                self.__exit__(type(failure), failure, failure.__traceback__)  # writes this rank's own file
                raise
        meeting_ns = time.perf_counter_ns()
        spans = self._recording.spans(wait=error is None)
        mine = RankTrace(rank, socket.gethostname(), os.getpid(), boot_id(), meeting_ns, spans)
        self.ranks = [mine]
        path = self.path
        if together:
            texts = gather_per_rank(json.dumps({**vars(mine), "spans": [vars(span) for span in spans]}))
            if rank != 0:
                return
            plain = [json.loads(each) for each in texts]
            self.ranks = [RankTrace(**{**each, "spans": [Span(**span) for span in each["spans"]]}) for each in plain]
        elif world_size > 1:
            path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        path.write_text(json.dumps({"traceEvents": chrome_events(self.ranks), "displayTimeUnit": "ms"}))

    def shares(self) -> list[Shares]:
        """The uses of time, for each rank that is known here."""
        return [_shares(each) for each in self.ranks]

    def __str__(self) -> str:
        return "\n".join([*map(str, self.shares()), f"The picture is in {self.path}: open it in ui.perfetto.dev."])

    def step_began(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """See `StepWatcher`."""
        self._optimizer_began = self._recording.now()

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """See `StepWatcher`."""
        recording = current_recording()
        if recording is not None:
            name = f"{type(optimizer).__name__}.step"
            recording.add(name, MAIN, self._optimizer_began, recording.now(), optimizer=True)


def chrome_events(ranks: Sequence[RankTrace]) -> list[dict[str, Any]]:
    """The spans as trace events: a process per rank, a row for its thread, and as many rows as buckets overlap.

    Times are in microseconds from the first span on. Ranks of other hosts are lined up with rank 0's by the moment at
    which all met at the end, which is right to within a few hundred microseconds.
    """
    if not ranks:
        return []
    shifts = {each.rank: 0 if each.clock == ranks[0].clock else ranks[0].meeting_ns - each.meeting_ns for each in ranks}
    first = min((span.begin_ns + shifts[each.rank] for each in ranks for span in each.spans), default=0)
    events: list[dict[str, Any]] = []
    for each in ranks:
        total_of = f"rank {each.rank} (pid {each.pid} on {each.host})"
        events.append(_metadata(each.rank, 0, "process_name", name=total_of))
        events.append(_metadata(each.rank, 0, "process_sort_index", sort_index=each.rank))
        rows = list(enumerate_rows(each.spans))
        for row in sorted({row for row, _ in rows}):
            name = MAIN if row == 0 else EXCHANGE if row == 1 else f"{EXCHANGE} (at the same time)"
            events.append(_metadata(each.rank, row, "thread_name", name=name))
        for row, span in rows:
            events.append(
                {
                    "name": span.name,
                    "cat": span.lane,
                    "ph": "X",
                    "pid": each.rank,
                    "tid": row,
                    "ts": (span.begin_ns + shifts[each.rank] - first) / 1e3,
                    "dur": (span.end_ns - span.begin_ns) / 1e3,
                    "args": {"step": span.step, **span.facts},
                }
            )
    return events


def enumerate_rows(spans: Iterable[Span]) -> Iterable[tuple[int, Span]]:
    """(row, span): row 0 for the thread that trains; exchanges take the first row from 1 on that is free by then."""
    free: list[int] = []  # when each row of exchanges becomes free
    for span in spans:
        if span.lane == MAIN:
            yield 0, span
            continue
        row = next((index for index, end in enumerate(free) if end <= span.begin_ns), len(free))
        free[row : row + 1] = [span.end_ns]
        yield row + 1, span


def _metadata(rank: int, row: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": row, "args": args}


def _shares(rank: RankTrace) -> Shares:
    steps = {span.step for span in rank.spans}
    count = max(1, len(steps))

    def total(spans: Iterable[Span]) -> float:
        return sum(span.end_ns - span.begin_ns for span in spans) / 1e9 / count

    def total_of(name: str) -> float:
        return total(span for span in rank.spans if span.name == name)

    return Shares(
        rank=rank.rank,
        steps=len(steps),
        data=total_of("data"),
        forward=total_of("forward"),
        backward=total_of("backward"),
        exchange=_busy_ns([span for span in rank.spans if span.lane == EXCHANGE]) / 1e9 / count,
        exposed=total_of("wait for averages"),
        optimizer=total(span for span in rank.spans if span.facts.get("optimizer")),
    )


def _busy_ns(spans: Sequence[Span]) -> int:
    """Return the time in which at least one of the spans was under way; they come in the order of their beginnings."""
    busy, until = 0, 0
    for span in spans:
        busy += max(0, span.end_ns - max(until, span.begin_ns))
        until = max(until, span.end_ns)
    return busy
