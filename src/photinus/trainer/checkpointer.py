"""A loop's checkpoints and snapshots: the one road between a rank's state, the memory of its host, and the disk.

    take     copies the state into memory of the host, between two bodies (see snapshots.py and state_memory.py)
    persist  saves a checkpoint: takes the state, and lets a process write what is in memory while the ranks train on.
             A small state is written at once, and so is one for which there is no memory
    wait     until that checkpoint is on the disk
    restore  goes on from the newest of both, in memory or on the disk

A host holds two copies of a state at most, also while a checkpoint is written: a snapshot is what the process reads,
and until it has, the next snapshots go to the other side.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import PhotinusError
from ..job import status
from ..parallel.exchange.agreement import JSON, from_rank_0, gather_per_rank, together
from ..parallel.exchange.tensors import tensors_in
from ..parallel.zero.split_states import is_known_split
from ..runlog.tables import Row
from .checkpoint import state_memory
from .checkpoint.folder import CHECKPOINTS, Checkpoint, CheckpointFolder, opened_by_all
from .checkpoint.image import Content
from .checkpoint.image_reader import MemorySnapshot
from .checkpoint.position import Position
from .checkpoint.state_memory import HostImage
from .checkpoint.writer import WRITER, Order
from .data import rng
from .record.resume import ResumePoint, choose_point
from .record.run_folder import RunFolder
from .record.spec import RunSpec
from .session.progress import say
from .session.session import Session
from .snapshots import Snapshots
from .state import LoopState


@dataclass(frozen=True)
class Restored:
    """The place from which a loop goes on.

    Attributes:
        point: what rank 0 chose; of other ranks, only its checkpoint.
        numbers: states of this rank's generators, to restore just before the first batch.
        path: the checkpoint; Path("memory") for a snapshot; None: the run begins.
        steps_lost: finished steps after the snapshot; -1: it is none.
        is_unsaved: the disk lacks the checkpoint that was begun before the snapshot.
    """

    point: ResumePoint
    position: Position
    numbers: Mapping[str, Any] | None = None
    path: Path | None = None
    steps_lost: int = -1
    is_unsaved: bool = False


class Checkpointer:
    """The checkpoints of one loop. All ranks call its methods together.

    Attributes:
        newest: path of the newest checkpoint of the run; None before the first.
        saved_step: step of the checkpoint that was begun last; -1 before the first.
        is_writing: whether `wait` was not called for the last checkpoint yet.
    """

    def __init__(self, session: Session, state: LoopState, folder: RunFolder, spec: RunSpec) -> None:
        self._session, self._state, self._folder, self._spec = session, state, folder, spec
        self.newest: Path | None = None
        self.saved_step = -1
        self.is_writing = False
        self._is_parted = False  # other hosts write, too
        self._busy_side: int | None = None  # of the snapshots, from which is written
        self._written: Path | None = None  # on rank 0: the newest
        self._order: Order | None = None  # on a rank that leads a writing: the last one
        self.snapshots = Snapshots(session, folder.run, spec.saving.snapshot_every, splits=state.splits())
        session.at_end(lambda _: wait_for_writer())

    # -- on the way to the disk --------------------------------------------------------------------------------------

    def step_ended(self, step: int) -> bool:
        """A step is done, and counts when this returns. Returns whether to `take` a snapshot now."""
        return self.snapshots.step_ended(step, self._busy_side)

    def take(self, position: Position) -> None:
        """Take a snapshot of the step that is done."""
        streams = self._state.whole_streams(position)

        def image() -> Content:
            return self._state.image(position, streams, None, self.saved_step)

        side = self.snapshots.target(self._busy_side)
        assert side is not None, "`step_ended` has found one"
        self.snapshots.take(position.step, lambda: self.snapshots.plan(position.step, image()), side)

    def persist(self, position: Position) -> None:
        """Save a checkpoint of the step that is done; where `is_writing` is true then, `wait` has to follow.

        Raises:
            CheckpointError, OSError, ValueError: it could not be written; every rank raises.
        """
        self.wait()
        step = self.saved_step = position.step
        if self._folder.path is None:
            return
        with together("waiting for the checkpoint of another loop", is_long=True):
            wait_for_writer()
        mine: dict[str, Any] = {"rng": rng.capture(), "bytes": self._state.bytes_held}
        everyone = gather_per_rank(mine)
        numbers = [each["rng"] for each in everyone]
        whole_bytes = sum(each["bytes"] for each in everyone) if self._state.splits() else everyone[0]["bytes"]
        is_large = whole_bytes >= state_memory.LEAST_BYTES
        streams, image, whole = self._state.whole_streams(position), None, dict[str, Any]()
        if is_large:
            image = self._hold(position, streams, numbers)
        if image is None:
            with together(f"gathering what to save at step {step}"):
                whole = self._state.whole(position, streams, numbers)
        doing = f"saving the checkpoint of step {step} in {self._folder.path}"
        begin = partial(self._begin_to_write, position, whole, image, is_large=is_large)
        path = from_rank_0(begin, doing, is_long=True)
        self._is_parted, self.is_writing = image is not None and image.hosts > 1, path is None
        if image is not None and self._is_parted:
            with together(f"saving parts of the checkpoint of step {step} in {self._folder.path}"):
                if image.host and image.files:
                    self._order = Order(str(self.folder), step)
                    WRITER.write(self._order, image)
        self._note_newest(path)

    def _hold(self, position: Position, streams: Mapping[str, Any], numbers: list[Any]) -> HostImage | None:
        """Take the state for the process that writes. Returns None where that cannot be: then it has to be gathered."""
        memory, snapshots, step = WRITER.memory, self.snapshots, position.step
        side: int | None = None
        memory.hosts()
        if snapshots.is_pending:
            snapshots.decide(step)
        is_snapshot = snapshots.is_on and self._session.local_world_size <= state_memory.MOST_RANKS
        with together(f"copying what to save in {self.folder}"):
            content = self._state.image(position, streams, numbers, step)
            is_known = all(map(is_known_split, tensors_in(content.own)))
            copy = snapshots.plan(step, content) if is_snapshot else memory.plan(content, step)
        is_split = bool(content.own)
        if is_snapshot:
            side = snapshots.target(None)
            assert side is not None, "nothing is being written"
            file = snapshots.take(step, lambda: copy, side, for_disk=True)
        if not is_known:  # only torch can gather it
            return None
        if not (is_snapshot and snapshots.is_on):  # there may be room for one copy, but not for two
            side, file = None, memory.take(copy, is_split=is_split)
        image = memory.share(copy, file, self.folder, is_split=is_split)
        self._busy_side = None if image is None else side
        return image

    def _begin_to_write(
        self, position: Position, whole: dict[str, Any], image: HostImage | None, *, is_large: bool
    ) -> str | None:
        """On rank 0: return the checkpoint's path; None where another process writes it."""
        self._folder.flush()
        step, saving, memory = position.step, self._spec.saving, WRITER.memory
        row = position.history[-1] if position.history and position.history[-1]["step"] == step else None
        metric = None if saving.best is None or row is None else row.get(saving.best.removeprefix("-"))
        description = position.description(self._spec.length.describe(position))
        if image is None and is_large:
            copy = memory.plan(Content(whole, {}), step, alone=True)
            image = memory.share(copy, memory.take(copy), self.folder, alone=True)
        if image is not None:
            self._order = Order(str(self.folder), step, description, metric, saving.keep_last, saving.best)
            WRITER.write(self._order, image, partial(self._note_written, step, row))
            return None
        began = time.perf_counter()
        checkpoints = CheckpointFolder(self.folder, keep_last=saving.keep_last, best=saving.best)
        path = checkpoints.save(step, whole, description=description, metric=metric)
        self._note_written(step, row, str(path), time.perf_counter() - began)
        return str(self._written)

    @property
    def folder(self) -> Path:
        """Return the folder of the checkpoints, on all ranks."""
        assert self._folder.path is not None, "a run that saves has a folder"
        return (self._folder.path / CHECKPOINTS).absolute()

    def _note_written(self, step: int, row: Row | None, path: str, seconds: float) -> None:
        """On rank 0: a checkpoint is on the disk. Raises ValueError: `best` names what its row does not have."""
        assert self._folder.path is not None, "a run that saves has a folder"
        self._written = self._folder.path / CHECKPOINTS / Path(path).name
        status.update(saved=step)
        self._folder.record_event("checkpoint", step, name=self._written.name, seconds=round(seconds, 6))
        best = None if self._spec.saving.best is None else self._spec.saving.best.removeprefix("-")
        if best is not None and row is not None and best not in row:
            raise ValueError(
                f"best={best!r}: nothing of that name was logged; there is {', '.join(sorted(row))}. What was "
                f"trained is saved in {self._written}: set it right, and start again."
            )

    def _note_newest(self, path: str | None) -> None:
        if path:
            self.newest = Path(path)
            status.update(saved=self.saved_step)

    @property
    def is_written(self) -> bool:
        """Return whether this rank knows that `wait` would not wait."""
        return self.is_writing and self._leads and WRITER.has_answered

    @property
    def _leads(self) -> bool:
        """Return whether this rank waits for a process that writes for this loop."""
        return self._order is not None and WRITER.order is self._order

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if one is. Raises as `persist` does, on all ranks."""
        if not self.is_writing:
            return
        self.is_writing, self._busy_side = False, None
        doing = f"writing a checkpoint in {self._folder.path}"
        if self._is_parted:  # all that write wait
            with together(doing, is_long=True):
                if self._leads:
                    WRITER.wait()

        def written() -> str:
            if self._leads:
                WRITER.wait()
            return str(self._written or "")

        self._note_newest(from_rank_0(written, doing, is_long=True))

    # -- and back ----------------------------------------------------------------------------------------------------

    def restore(self, resume: str | os.PathLike[str] | None, batches_per_epoch: int) -> Restored:
        """Put everything back to the newest checkpoint or snapshot, if there is any. Every rank reads it itself.

        Raises:
            CheckpointError: `resume` names no checkpoint, or it does not fit what is trained.
            PhotinusError: another job holds the folder.
            HostError: rank 0 cannot write into the folder.
        """
        snapshot, point = self.snapshots.find(), ResumePoint(None, goes_on=False)

        def choose() -> JSON:
            nonlocal point
            wait_for_writer()  # for another loop, which was left
            self._folder.lock()
            point = choose_point(self._folder.path, resume, snapshot, self._spec.saving.best)
            path = str(point.checkpoint.path.absolute()) if isinstance(point.checkpoint, Checkpoint) else None
            is_memory = isinstance(point.checkpoint, MemorySnapshot)
            return {"path": path, "is_memory": is_memory, "is_unsaved": point.is_unsaved}

        answer = from_rank_0(choose, "choosing a checkpoint", is_long=True)
        found = point.checkpoint if isinstance(point.checkpoint, Checkpoint) else None
        # Ranks that do not see rank 0's disk have a copy for the time of the block.
        with opened_by_all(answer["path"], found) as checkpoint:
            source = snapshot if answer["is_memory"] else checkpoint
            if source is None:
                return Restored(point, Position())
            position, numbers = self._state.load(source, batches_per_epoch)
        if isinstance(source, MemorySnapshot):
            status.update(saved=-1 if answer["is_unsaved"] else source.saved_step)
            self.snapshots.go_on_from(source)
            return Restored(point, position, numbers, source.path, source.steps_lost, answer["is_unsaved"])
        self.saved_step, self.newest = position.step, source.path
        status.update(saved=self.saved_step)
        return Restored(point, position, numbers, source.path)


def wait_for_writer() -> None:
    """Wait for the checkpoint that is being written, of whichever loop; a failure is a warning. For any rank."""
    try:
        WRITER.wait()
    except (OSError, ValueError, PhotinusError) as failure:
        say(f"warning: {failure}")
