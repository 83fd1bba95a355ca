"""A picture of some steps on all ranks: forward, backward, the exchange of each bucket, operators and kernels.

    with photinus.trace("trace.json", skip=2, steps=5) as trace:    # on every rank
        for x, y in batches:
            ...
    print(trace)

torch.profiler records each rank; rank 0 lays the ranks side by side. The file is in Chrome's trace event format;
chrome://tracing and ui.perfetto.dev open it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
import time
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction, profile

from ...errors import PhotinusError
from ...runlog.events import boot_id
from ..exchange.agreement import place_in_group
from ..exchange.collectives import all_gather_bytes, resolve_group
from .device_clock import clock_of
from .spans import follow_steps, is_followed, profiler_is_on

_DEVICE_LIMIT_S = 5.0  # after an error: a device that takes longer may never end its work
# Names of spans.
_STEP, _BACKWARD, _BUCKET = "ProfilerStep#", "backward", "bucket "
_OPERATION = re.compile(r"\w+:\w+")  # of a backend
# What begins inside one thing that its thread does and ends inside another gets a row of its own.
_ROWS = {1: "steps", 2: "backward", 3: "exchange"}

Event = dict[str, Any]


@dataclass
class RankTrace:
    """The record of one rank's profiler.

    Attributes:
        rank: in the default group.
        host, pid: where it runs.
        clock: names the clock; ranks with the same one have comparable times.
        meeting_ns: Unix time of this rank's clock at the moment when all ranks had met.
        base_ns: Unix time from which the events count.
        events: in Chrome's format, with times in microseconds.
    """

    rank: int
    host: str
    pid: int
    clock: str
    meeting_ns: int
    base_ns: int
    events: list[Event]


@dataclass(frozen=True)
class Shares:
    """The time of one rank's steps by its use, in seconds per step.

    Attributes:
        data: waiting for the next batch, in a `photinus.Loop`.
        forward, backward, optimizer: computing; on a GPU, as long as the device does.
        exchange: during which at least one bucket was under way.
        exposed: the part of it that backward did not hide.
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
    `torch.optim` optimizer. torch.profiler records them, with all operators and the kernels of a GPU; it makes small
    steps on the CPU slower. With a process group, all ranks must enter and exit the block.

    Args:
        path: path of the file, which rank 0 writes at the end. If an exception ends the block, other ranks may be gone,
            so each rank writes its own part to NAME.rankR.json (with one rank: NAME.json).
        skip: number of first steps to leave out. They are slower: buckets are built, memory is touched. Default: 0.
        steps: number of steps to record. Default: all that follow.

    Raises:
        ValueError: skip is below 0, steps is below 1, or the folder does not exist.
        PhotinusError: this process is recording another trace, or a torch.profiler is on.
    """
    path = Path(path)
    if skip < 0 or (steps is not None and steps < 1):
        raise ValueError(f"skip={skip}, steps={steps}: skip is 0 or more, steps 1 or more (or None for all)")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} into")
    return Trace(path, skip, steps)


class Trace(AbstractContextManager["Trace"]):
    """The trace of a few steps, as `trace` returns it.

    Attributes:
        path: of the file.
        ranks: on rank 0, after the end: what each rank recorded. Elsewhere this rank's.
    """

    def __init__(self, path: Path, skip: int, steps: int | None) -> None:
        self.path = path
        self.ranks: list[RankTrace] = []
        self._skip = skip
        self._last = None if steps is None else skip + steps
        self._profile = profile(schedule=self._action)

    def _action(self, begun: int) -> ProfilerAction:
        """Return the profiler's task after `begun` steps have begun."""
        if begun <= self._skip:
            return ProfilerAction.WARMUP if begun == self._skip else ProfilerAction.NONE
        if self._last is None or begun < self._last:
            return ProfilerAction.RECORD
        return ProfilerAction.RECORD_AND_SAVE if begun == self._last else ProfilerAction.NONE

    def __enter__(self) -> Trace:
        if is_followed():
            raise PhotinusError("a trace is on in this process; end it before the next one begins")
        if profiler_is_on():
            raise PhotinusError("a torch.profiler is on in this process; end it before the trace begins")
        self._profile.start()
        follow_steps(self._profile.step)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        follow_steps(None)
        rank, world_size = place_in_group()
        own = RankTrace(rank, socket.gethostname(), os.getpid(), boot_id(), 0, 0, [])
        if error is None or _device_is_done():
            self._profile.stop()
            own.base_ns, own.events = _recorded(self._profile)
        self.ranks = [own]
        own_path = self.path.with_name(f"{self.path.stem}.rank{rank}{self.path.suffix}")
        if error is not None or world_size == 1:
            _write(self.path if world_size == 1 else own_path, self.ranks)
            return
        try:
            dist.barrier()
            own.meeting_ns = time.time_ns()
            texts = all_gather_bytes(zlib.compress(json.dumps(vars(own)).encode(), 1), resolve_group(None))
        except Exception:
            _write(own_path, self.ranks)
            raise
        if rank == 0:
            self.ranks = [RankTrace(**json.loads(zlib.decompress(text))) for text in texts]
            _write(self.path, self.ranks)

    def shares(self) -> list[Shares]:
        """The uses of time, for each rank that is known here."""
        return [_shares(each) for each in self.ranks]

    def __str__(self) -> str:
        return "\n".join([*map(str, self.shares()), f"The picture is in {self.path}: open it in ui.perfetto.dev."])


def _device_is_done() -> bool:
    """Waits for the GPU; returns whether it has ended its work. After an error it may wait for ranks that are gone."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    clock = clock_of(torch.device("cuda")) if is_used else None
    try:
        moment, deadline = None if clock is None else clock.now(), time.monotonic() + _DEVICE_LIMIT_S
        while moment is not None and not moment.passed:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
    except RuntimeError:  # the error was the device's own: it answers nothing any more
        return False
    return True


def _recorded(profiler: profile) -> tuple[int, list[Event]]:
    """The profiler's time base, and the events that have ended."""
    if profiler.profiler is None:  # it was to begin later
        return 0, []
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        text = Path(file.name).read_text(errors="replace")
    # Threads' names stand there as they are, quotes and line ends included.
    recorded = json.loads(re.sub(r'(?s)"thread (\d+) \(.*?\)"\s*\}', r'"thread \1"}', text), strict=False)
    events = [
        event
        for event in recorded["traceEvents"]
        # The profiler's own rows have words for pids.
        if isinstance(event["pid"], int) and event.get("args", {}).get("finished", True)
    ]
    return recorded.get("baseTimeNanoseconds", 0), events


def _write(path: Path, ranks: Sequence[RankTrace]) -> None:
    path.write_text(json.dumps({"traceEvents": chrome_events(ranks), "displayTimeUnit": "ms"}))


def chrome_events(ranks: Sequence[RankTrace]) -> list[Event]:
    """The events of all ranks: a process per rank, with its threads and rows for steps, backwards and exchanges.

    Times are in microseconds from the first event on. Ranks of other hosts are lined up with rank 0's by the moment at
    which all met at the end, which is right to within a few hundred microseconds.
    """
    if not ranks:
        return []
    events: list[Event] = []
    for each in ranks:
        shift_ns = 0 if each.clock == ranks[0].clock else ranks[0].meeting_ns - each.meeting_ns
        shift = (each.base_ns + shift_ns - ranks[0].base_ns) / 1e3
        name = f"rank {each.rank} (pid {each.pid} on {each.host})"
        events.append(_metadata(each.rank, 0, "process_name", name=name))
        events.append(_metadata(each.rank, 0, "process_sort_index", sort_index=each.rank))
        rows = _rows(each.events)
        for row in sorted(set(rows.values())):
            events.append(_metadata(each.rank, row, "thread_name", name=_ROWS.get(row, "exchange (at the same time)")))
        for index, event in enumerate(each.events):
            if not event["name"].startswith("process_"):  # the same on all ranks
                moved = {**event, "pid": each.rank, "tid": rows.get(index, event["tid"]), "ts": event["ts"] + shift}
                # An arrow between events has an id, which each rank counts from 0.
                events.append({**moved, "id": f"{each.rank}.{event['id']}"} if "id" in event else moved)
    first = min((event["ts"] for event in events if event["ph"] == "X"), default=0)
    return [{**event, "ts": 0 if event["ph"] == "M" else event["ts"] - first} for event in events]


def _rows(events: Sequence[Event]) -> dict[int, int]:
    """Index of an event -> its row, where it has one; for exchanges the first from 3 on that is free by then."""
    rows: dict[int, int] = {}
    free: list[float] = []  # when each row of exchanges becomes free
    for index, event in sorted(enumerate(events), key=lambda pair: float(pair[1]["ts"])):
        name = event["name"] if event.get("cat") == "user_annotation" else ""
        if name.startswith(_STEP):
            rows[index] = 1
        elif name == _BACKWARD:
            rows[index] = 2
        elif name.startswith(_BUCKET) or _OPERATION.fullmatch(name):
            row = next((row for row, end in enumerate(free) if end <= event["ts"]), len(free))
            free[row : row + 1] = [event["ts"] + event["dur"]]
            rows[index] = 3 + row
    return rows


def _metadata(rank: int, row: int, kind: str, **args: Any) -> Event:
    return {"name": kind, "ph": "M", "pid": rank, "tid": row, "ts": 0, "args": args}


def _shares(rank: RankTrace) -> Shares:
    spans = [event for event in rank.events if str(event.get("cat")).endswith("user_annotation")]
    steps = len([1 for event in spans if event["name"].startswith(_STEP) and event["cat"] == "user_annotation"])

    def named(pattern: str) -> list[Event]:
        found = [event for event in spans if re.match(pattern, event["name"])]
        # What Python queued for a GPU counts when the GPU does it.
        return [event for event in found if event["cat"] == "gpu_user_annotation"] or found

    def share(*patterns: str) -> float:
        return _busy_us(event for pattern in patterns for event in named(pattern)) / 1e6 / max(1, steps)

    backward = f"{_BACKWARD}$"
    return Shares(
        rank=rank.rank,
        steps=steps,
        data=share("data$"),
        forward=share("forward$"),
        backward=share(backward),
        exchange=share(_BUCKET),
        exposed=share(backward, _BUCKET) - share(backward),
        optimizer=share("Optimizer.step#"),
    )


def _busy_us(spans: Iterable[Event]) -> float:
    """Return the time in which at least one of the spans was under way."""
    busy, until = 0.0, 0.0
    for begin, dur in sorted((float(event["ts"]), float(event["dur"])) for event in spans):
        end = begin + dur
        busy += max(0.0, end - max(until, begin))
        until = max(until, end)
    return busy
