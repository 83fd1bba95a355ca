"""Snapshots: a loop's state in the memory of its hosts, from which workers come back after a failure.

`photinus run` holds two memory files for each worker, which outlive it (see `job.worker_files`). Every N steps, when
the body of a step is done:

    decide  each rank waits until its last snapshot is sealed; one exchange says whether all are. From then on the one
            before may be overwritten: whenever a process is killed, there is a snapshot that all ranks have
    take    copies the whole state, between two bodies, while nothing of the script runs: weights may change in ways
            that no hook and no version counter shows (`.data`, numpy, collectives). A thread digests and seals the copy

A step counts as finished only after `decide`, so with N = 1 no more than one finished step is lost. While
one side is being written to the disk (see checkpointer.py), all snapshots use the other one. A kill in the middle of
one of them goes back to the checkpoint's.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from .. import env
from ..errors import PhotinusError
from ..job.cgroup import free_memory
from ..job.worker_files import Head, WorkerFiles, key_of
from ..job.world import name_ranks
from ..parallel.exchange.agreement import gather_per_rank
from ..runlog.units import size
from .checkpoint.image import Content, Copy, MemoryFile
from .checkpoint.image_reader import MemorySnapshot, find_kept
from .session.progress import say
from .session.session import Session

_MOST_COST = 0.01  # of the time, where the user gives no number of steps
_FIRST_STEPS = 2  # before the first snapshot
_FIRST_INTERVAL, _FIRST_S = 10, 0.5  # steps and seconds, at least, between snapshots until a cost is known
_MOST_OF_MEMORY = 0.9
_SPANS = 16  # steps, and
_COSTS = 5  # snapshots, whose mean counts
_NEW_SIDES = 2  # the first snapshots, which take new memory


class Snapshots:
    """The snapshots of one loop. All ranks call its methods together.

    Args:
        run: what the launcher calls it; without a folder "", and there are no snapshots.
        every: steps; 0: none; None: as often as is cheap.
    """

    _holder: ClassVar[Snapshots | None] = None  # the loop of this process that writes into the files
    _running: ClassVar[list[Snapshots]] = []  # those of loops with a folder whose bodies run, the innermost one last

    def __init__(self, session: Session, run: str, every: int | None, *, splits: bool | None) -> None:
        self._session, self._run, self._every = session, key_of(run) if run else "", every
        self._files: list[MemoryFile] = []
        self._sealed: dict[int, int] = {}  # by side, the step of a snapshot that all ranks have
        self._copy: Copy | None = None  # the one that is being sealed, on the other side
        self._pending: tuple[int, int] | None = None  # its side and step, on all ranks, also where one has none
        self._planned_step = self._next = self._count = 0  # all that were sealed
        self._planned_s = 0.0
        self._costs = _Costs()
        self._bytes = self._host_bytes = 0  # of this rank's first copy, and two of its host; 0 before it
        self._error = ""
        self.is_on = run != "" and every != 0
        if not self.is_on:
            return
        self._paths, self._splits, why_not = WorkerFiles.of_this_process().images, splits, ""
        if session.launcher == "none" or len(self._paths) != session.local_world_size:
            why_not = "only `photinus run` keeps them"
        elif self._splits is None:
            why_not = "ranks train different models (check_ranks=False, or a process group of some ranks)"
        if any(gather_per_rank(why_not != "")):
            self._turn_off(why_not or "some ranks cannot have any", is_told=bool(every))

    def _turn_off(self, why: str, *, is_told: bool = True) -> None:
        self.is_on = False
        if is_told and self._session.is_main:
            say(f"note: no snapshots in memory: {why}")

    def find(self) -> MemorySnapshot | None:
        """The newest snapshot of this run that all hosts hold, after a restart."""
        if not self.is_on or env.ATTEMPT.get() == 0:
            return None
        return find_kept(self._run, self._paths, self._session.local_rank)

    def go_on_from(self, snapshot: MemorySnapshot) -> None:
        """The loop goes on from this snapshot, which stays until all ranks have a later one."""
        self._sealed = {snapshot.side: snapshot.step}

    # -- while the loop runs -----------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Bodies begin, or go on after a body was left early."""
        if self.is_on and Snapshots._holder is not self:  # not before: a loop that has nothing to do needs no files
            holder = Snapshots._holder
            if holder in Snapshots._running:  # which is what a restart goes on with
                self._turn_off("the loop whose body runs this one has them", is_told=bool(self._every))
            else:
                self._hold(holder, step)
        if self._run:
            Snapshots._running.append(self)
        self._costs.begin()

    def _hold(self, holder: Snapshots | None, step: int) -> None:
        """Takes over the files."""
        Snapshots._holder = self
        try:
            if holder is not None:
                self._files, self._sealed = holder.let_go(), {}
            else:
                self._files = [MemoryFile(path) for path in self._paths[self._session.local_rank]]
            for side, file in enumerate(self._files):
                if side not in self._sealed:
                    file.unseal()
        except OSError as error:
            self._error = str(error)
        self._plan(step, self._every or _FIRST_STEPS)

    def end(self) -> None:
        """Bodies are over, or left for a while."""
        if self in Snapshots._running:
            Snapshots._running.remove(self)

    def let_go(self) -> list[MemoryFile]:
        """The files, for another loop. This one takes them back if it goes on."""
        files, self._files, self._sealed, self._pending = self._files, [], {}, None
        if self._copy is not None:
            with contextlib.suppress(OSError, RuntimeError, ValueError):  # it does not matter any more
                self._copy.wait()
            self._copy = None
        return files

    def free(self) -> None:
        """The run is over, and all of it on disk: gives the memory back."""
        if Snapshots._holder is self:
            self._files = self.let_go()
            for file in self._files:
                file.make_room(0)

    def step_ended(self, step: int, busy_side: int | None) -> bool:
        """A step is done, and counts when this returns. Returns whether to `take` a snapshot now.

        Args:
            busy_side: the side from which a checkpoint is being written; None for none.

        Raises:
            PhotinusError: another loop is in the middle of a body. On all ranks.
        """
        self._costs.step_ended()
        if self.is_on and Snapshots._running[-1] is not self:
            raise PhotinusError(
                "two loops with out=... take turns, so no snapshot holds both at the same step, and a restart would "
                "continue them from different steps. Use one loop, and give it the second model and its optimizer: "
                "Loop(..., state={'second': model, 'second_optimizer': optimizer}). Or give both loops "
                "save=Saving(snapshot_every=0): then each continues from its newest checkpoint"
            )
        is_due = self.is_on and step >= self._next
        if is_due and (self._pending is not None or self.target(busy_side) is not None):
            is_due = self.decide(step)
        if self._files:
            self._files[0].note_progress(step)
        return is_due and self.target(busy_side) is not None

    def decide(self, step: int) -> bool:
        """Agree on whether all ranks have sealed the last snapshot; plan the next. Returns whether there are any."""
        is_sealed = False
        pending, self._pending = self._pending, None
        copy, self._copy = self._copy, None
        if copy is not None:
            try:
                copy.wait()
                is_sealed = True
            except (OSError, RuntimeError, ValueError) as error:
                self._error = str(error)
            self._costs.sealed(0.0 if self._has_free_cores() else copy.beside_s)
        step_s = (time.perf_counter() - self._planned_s) / max(1, step - self._planned_step)
        mine = float(not is_sealed), float(self._error != ""), self._costs.usual_s, step_s
        failed, broken, cost_s, step_s = self._most(mine)
        if broken:
            texts = gather_per_rank(self._error)
            rank = next(rank for rank, text in enumerate(texts) if text)
            self._turn_off(f"{name_ranks([rank])}: {texts[rank]}")
            return False
        if pending is not None and not failed:
            self._sealed[pending[0]] = pending[1]
            self._count += 1
        least, pause_s = (_FIRST_INTERVAL, _FIRST_S) if cost_s < 0 else (1, cost_s / _MOST_COST)
        self._plan(step, self._every or max(least, math.ceil(pause_s / max(step_s, 1e-9))))
        return True

    def _plan(self, step: int, interval: int) -> None:
        self._planned_step, self._planned_s = step, time.perf_counter()
        self._next = (step // interval + 1) * interval if self._every else step + interval

    def plan(self, step: int, content: Content) -> Copy:
        """Return this rank's piece of a snapshot, not copied yet. Raises TypeError, ValueError: it cannot be saved."""
        session = self._session
        place = session.rank, session.world_size, session.local_rank, session.local_world_size
        return Copy(Head(self._run, step, *place, split=bool(self._splits)), content)

    def take(self, step: int, make: Callable[[], Copy], side: int, *, for_disk: bool = False) -> MemoryFile | str:
        """Begin a snapshot of the step that is done. All ranks call it; what fails on one is said at the next `decide`.

        Args:
            make: plans the copy.
            side: from `target`.
            for_disk: another process reads it now, which shows in the time of the steps that follow.

        Returns:
            The file that has it, or why there is none.
        """
        began_s, copy = time.perf_counter(), None
        try:
            copy = make()
        except (TypeError, ValueError, RuntimeError) as error:
            self._error = str(error)
        if not self._host_bytes:
            self._look_for_memory(copy)
        if not self.is_on:
            return "no room"
        self._pending = side, step
        self._sealed.pop(side, None)
        if copy is None or not self._files:
            return self._error
        file = self._files[side]
        try:
            self._check_growth(copy, file)
            copy.take(file)
            copy.seal_beside()
            if for_disk:
                copy.wait_for_device()
        except (OSError, RuntimeError, ValueError) as error:
            self._error = str(error)
        self._copy = copy
        if not for_disk:
            self._costs.taken(time.perf_counter() - began_s)
        return self._error or file

    @property
    def is_pending(self) -> bool:
        """Return whether it is not known yet if all ranks have sealed the last snapshot."""
        return self._pending is not None

    def target(self, busy_side: int | None) -> int | None:
        """Return the side to write: the older one, such that all ranks have what is on the other; None for none.

        Args:
            busy_side: not this one: a checkpoint is being written from it.
        """
        sides = [side for side in (0, 1) if side != busy_side and (not self._sealed or 1 - side in self._sealed)]
        return min(sides, key=lambda side: self._sealed.get(side, -1), default=None)

    def _look_for_memory(self, copy: Copy | None) -> None:
        """Turns snapshots off where two copies of a host's state do not fit into its memory."""
        mine: dict[str, Any] = {
            "host": (self._session.host, self._paths[0][0]),
            "needed": 2 * copy.bytes if copy is not None else 0,
            "has": sum(file.allocated_bytes for file in self._files),
            "free": free_memory(),
        }
        self._bytes = mine["needed"] // 2
        everyone = gather_per_rank(mine)
        for host in dict.fromkeys(each["host"] for each in everyone):
            there = [each for each in everyone if each["host"] == host]
            needed, free = sum(each["needed"] for each in there), min(each["free"] for each in there)
            if host == mine["host"]:
                self._host_bytes = max(1, needed)
            if needed - sum(each["has"] for each in there) > _MOST_OF_MEMORY * free and self.is_on:
                self._turn_off(
                    f"two copies need {size(needed)} of memory on host {host[0]}, which has {size(free)} free"
                )

    def _check_growth(self, copy: Copy, file: MemoryFile) -> None:
        """Raises ValueError where the state has grown since, and no longer fits; other ranks' grow like this one's."""
        growth = (copy.bytes - file.allocated_bytes) * self._host_bytes // (2 * max(1, self._bytes))
        if copy.bytes > self._bytes and growth > _MOST_OF_MEMORY * (free := free_memory()):
            raise ValueError(
                f"the state grew from {size(self._bytes)} to {size(copy.bytes)}, and {size(growth)} more do not fit "
                f"into the memory of host {self._session.host}, which has {size(free)} free"
            )

    def _most(self, values: tuple[float, ...]) -> list[float]:
        """The largest of each value over the ranks."""
        if self._session.world_size == 1:
            return [*values]
        tensor = torch.tensor(values, dtype=torch.float64, device=self._session.exchange_device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return [float(each) for each in tensor.tolist()]

    def _has_free_cores(self) -> bool:
        """Return whether each rank's copy has a core that no rank computes on."""
        threads = self._session.local_world_size * (torch.get_num_threads() + 1)
        return self._session.device.type != "cpu" or len(os.sched_getaffinity(0)) >= threads


class _Costs:
    """The measured cost of a snapshot: what the step that follows takes longer than steps usually do.

    So it counts the exchanges, the copy, and the caches that the copy has emptied. The digest may take several steps to
    end, so its processor time counts besides, and perhaps twice. The mean of the costs is what training pays: a median
    would leave out the dear ones. The first two snapshots are left out: they take new memory.
    """

    def __init__(self) -> None:
        self._spans: deque[float] = deque(maxlen=_SPANS)  # of steps without a snapshot
        self._costs: deque[float] = deque(maxlen=_COSTS)
        self._count = 0
        self._taken_s = self._excess_s = 0.0
        self._is_measured = False  # the last one is a snapshot, and not the memory of a checkpoint
        self.begin()

    def begin(self) -> None:
        """Steps begin, or go on after a while."""
        self._stamp_s, self._is_taken = time.perf_counter(), False

    def step_ended(self) -> None:
        """A step is done."""
        span_s, self._stamp_s = time.perf_counter() - self._stamp_s, time.perf_counter()
        if self._is_taken:
            self._is_taken = False
            self._excess_s = span_s - statistics.median(self._spans) if self._spans else 0.0
        else:
            self._spans.append(span_s)

    def taken(self, seconds: float) -> None:
        """A snapshot was taken, and training was held up for these seconds."""
        self._is_taken = self._is_measured = True
        self._taken_s, self._excess_s = seconds, 0.0

    def sealed(self, beside_s: float) -> None:
        """The last snapshot is sealed, which took this processor time from training."""
        self._count += 1
        if self._count > _NEW_SIDES and self._is_measured:
            self._costs.append(max(self._excess_s, self._taken_s) + beside_s)
        self._is_measured = False

    @property
    def usual_s(self) -> float:
        """Return the seconds that one costs; -1 while it is not known."""
        return statistics.fmean(self._costs) if self._costs else -1.0
