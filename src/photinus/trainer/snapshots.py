"""Snapshots: a loop's state in the memory of its hosts, from which workers come back after a failure.

`photinus run` holds two memory files for each worker (`PHOTINUS_SNAPSHOTS`), which outlive it. Every N steps, when the
body of a step is done:

    settle  each rank waits until its last snapshot is sealed; one exchange says whether all are. From then on the one
            before may be overwritten: whenever a process is killed, there is a snapshot that all ranks have
    take    copies what may change at any time, and begins to copy what only optimizer steps change
    wait    before the next optimizer step: until that is copied, in most cases long ago

A step counts as finished only after `settle`, so with N = 1 no more than one finished step is lost.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from .. import env
from ..job import status
from ..job.cgroup import free_memory
from ..job.world import name_ranks
from ..parallel.exchange.agreement import gather_per_rank
from ..runlog.units import plural, size
from ..training_process import OptimizerSteps
from .checkpoint.image import Copy, Head, MemoryFile
from .checkpoint.kept import Kept, find_kept, key_of, snapshot_files
from .checkpoint.position import Position
from .saves import Saves
from .session.progress import say
from .session.session import Session

_MOST_COST = 0.01  # of the time, where the user gives no number of steps
_FIRST_STEPS = 2  # before the first snapshot
_FIRST_INTERVAL = 10  # steps from it, which shows what one costs, to the next
_MOST_OF_MEMORY = 0.9


class Snapshots:
    """The snapshots of one loop. All ranks call its methods together.

    Args:
        run: what the launcher calls it; without a folder "", and there are no snapshots.
        every: steps; 0: none; None: as often as is cheap.
    """

    _holder: ClassVar[Snapshots | None] = None  # the loop of this process that writes into the files

    def __init__(self, session: Session, saves: Saves, run: str, every: int | None) -> None:
        self._session, self._saves, self._run, self._every = session, saves, key_of(run), every
        self._files: list[MemoryFile] = []
        self._sealed: tuple[int, int] | None = None  # side and step of the last one that all ranks have
        self._copy: Copy | None = None  # the one under way, on the other side
        self._copied_step = 0
        self._steps: OptimizerSteps | None = None
        self._unsteady: set[int] = set()
        self._planned_step = self._next = self._count = 0
        self._planned_s, self._blocked_s, self._cost_s = 0.0, 0.0, 0.0
        self._host_bytes = 0  # of two copies; 0 before the first snapshot
        self._error = ""
        self._is_on = run != "" and every != 0
        if not self._is_on:
            return
        self._paths, self._splits, why_not = snapshot_files(), saves.splits(), ""
        if session.launcher == "none" or len(self._paths) != session.local_world_size:
            why_not = "only `photinus run` keeps them"
        elif self._splits is None:
            why_not = "ranks train different models (check_ranks=False, or a process group of some ranks)"
        if any(gather_per_rank(why_not != "")):
            self._turn_off(why_not or "some ranks cannot have any", is_told=bool(every))

    def _turn_off(self, why: str, *, is_told: bool = True) -> None:
        self._is_on = False
        if is_told and self._session.is_main:
            say(f"note: no snapshots in memory: {why}")

    def find(self) -> Kept | None:
        """The newest snapshot of this run that all hosts hold, after a restart."""
        if not self._is_on or env.ATTEMPT.get() == 0:
            return None
        return find_kept(self._run, self._paths, self._session.local_rank)

    def go_on_from(self, kept: Kept) -> None:
        """The loop goes on from this snapshot, which stays until all ranks have a later one."""
        self._sealed = kept.side, kept.step

    # -- while the loop runs -----------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Bodies begin, or go on after a body was left early."""
        if not self._is_on:
            return
        if Snapshots._holder is not self:  # not before: a loop with nothing left to do leaves those of others alone
            holder = Snapshots._holder
            if holder is not None and holder._steps is not None:  # which is what a restart goes on with
                self._turn_off("the loop whose body runs this one has them", is_told=bool(self._every))
                return
            Snapshots._holder = self
            try:
                if holder is not None:
                    self._files = holder.let_go()
                else:
                    self._files = [MemoryFile(path) for path in self._paths[self._session.local_rank]]
                for side, file in enumerate(self._files):
                    if self._sealed is None or side != self._sealed[0]:
                        file.unseal()
            except OSError as error:
                self._error = str(error)
            self._plan(step, self._every or _FIRST_STEPS)
        if self._steps is None:
            self._steps = OptimizerSteps(began=_disable_dynamo(lambda _: self._wait()), ended=lambda _: None)

    def end(self) -> None:
        """Bodies are over, or left for a while: from now on anything may change."""
        if self._steps is not None:
            self._steps.remove()
            self._steps = None
            self._wait()

    def let_go(self) -> list[MemoryFile]:
        """The files, for another loop. This one takes them back if it goes on."""
        files, self._files, self._sealed = self._files, [], None
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

    def settle(self, step: int, saved: int) -> bool:
        """A step is done, and counts when this returns. Returns whether to `take` a snapshot now.

        Args:
            saved: the step of the newest checkpoint.
        """
        is_due = self._is_on and step >= self._next and self._settle(step, saved)
        if self._files:
            self._files[0].note_progress(step)
        return is_due

    def _settle(self, step: int, saved: int) -> bool:
        now_s, is_sealed = time.perf_counter(), False
        copy, self._copy = self._copy, None
        if copy is not None:
            try:
                is_sealed = copy.wait()
            except (OSError, RuntimeError, ValueError) as error:
                self._error = str(error)
            self._unsteady |= copy.changed
            self._blocked_s += time.perf_counter() - now_s
            self._cost_s = self._blocked_s + (0.0 if self._has_free_cores() else copy.cpu_s)
        step_s = (now_s - self._planned_s) / max(1, step - self._planned_step)
        mine = float(not is_sealed), float(self._error != ""), self._cost_s, step_s
        failed, broken, cost_s, step_s = self._most(mine)
        if broken:
            texts = gather_per_rank(self._error)
            rank = next(rank for rank, text in enumerate(texts) if text)
            self._turn_off(f"{name_ranks([rank])}: {texts[rank]}")
            return False
        if not failed:
            self._sealed = self._target, self._copied_step
            self._count += 1
            status.tell(saved=max(saved, self._copied_step))
        least = 1 if self._host_bytes else _FIRST_INTERVAL
        interval = self._every or max(least, math.ceil(cost_s / _MOST_COST / max(step_s, 1e-9)))
        self._plan(step, interval)
        return True

    def _plan(self, step: int, interval: int) -> None:
        self._planned_step, self._planned_s = step, time.perf_counter()
        self._next = (step // interval + 1) * interval if self._every else step + interval

    def put_off(self) -> None:
        """In place of `take`: gradients add up for a later step, which no snapshot has."""
        self._next = self._planned_step + 1

    def take(self, position: Position, saved: int) -> None:
        """Begins a snapshot of the step that is done; a checkpoint of the step `saved` may be on its way to disk."""
        began_s, session, copy = time.perf_counter(), self._session, None
        streams = self._saves.whole_streams(position)
        try:
            with torch.no_grad():
                place = session.rank, session.world_size, session.local_rank, session.local_world_size
                head = Head(self._run, position.step, *place, split=bool(self._splits))
                content = self._saves.image(position, streams, self._unsteady)
                content.common["position"]["saved_step"] = saved
                copy = Copy(head, content)
        except (TypeError, ValueError, RuntimeError) as error:
            self._error = str(error)
        if not self._host_bytes:
            self._look_for_memory(copy)
        if copy is None or not self._is_on:
            return
        try:
            copy.begin(self._files[self._target])
        except (OSError, RuntimeError, ValueError) as error:
            self._error = str(error)
        self._copy, self._copied_step = copy, position.step
        self._blocked_s = time.perf_counter() - began_s

    @property
    def _target(self) -> int:
        """The side to write: not that of the last snapshot that all ranks have."""
        return 0 if self._sealed is None else 1 - self._sealed[0]

    def _wait(self) -> None:
        if self._copy is not None:
            began_s = time.perf_counter()
            self._copy.wait_copied()
            self._blocked_s += time.perf_counter() - began_s

    def _look_for_memory(self, copy: Copy | None) -> None:
        """Turns snapshots off where two copies of a host's state do not fit into its memory."""
        mine: dict[str, Any] = {
            "host": (self._session.host, self._paths[0][0]),
            "needed": 2 * copy.bytes if copy is not None else 0,
            "has": sum(file.allocated_bytes for file in self._files),
            "free": free_memory(),
        }
        everyone = gather_per_rank(mine)
        for host in dict.fromkeys(each["host"] for each in everyone):
            there = [each for each in everyone if each["host"] == host]
            needed, free = sum(each["needed"] for each in there), min(each["free"] for each in there)
            if host == mine["host"]:
                self._host_bytes = max(1, needed)
            if needed - sum(each["has"] for each in there) > _MOST_OF_MEMORY * free and self._is_on:
                self._turn_off(
                    f"two copies need {size(needed)} of memory on host {host[0]}, which has {size(free)} free"
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

    def describe(self) -> str:
        """Return the number of snapshots, and their memory; "" if there were none."""
        if not self._host_bytes:
            return ""
        return f"{plural(self._count, 'snapshot')} taken, in {size(self._host_bytes)} of memory on each host"
