"""The newest snapshot in the memory of the hosts, for a loop that starts again. All ranks look for it together."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...job.worker_files import Head, WorkerFiles, key_of, read_head, read_progress
from ...job.world import name_ranks
from ...parallel.exchange.agreement import gather_per_rank, place_in_group
from . import image_reader


@dataclass(frozen=True)
class MemorySnapshot:
    """A snapshot that all hosts hold, whole and verified. A loop loads it like a `Checkpoint`.

    Attributes:
        step: of the training.
        steps_lost: number of finished steps after it.
        path: what stands for it where a checkpoint has a path.
        saved_step: the step of the last checkpoint that was begun before.
        side: which of this rank's two files it is in.
    """

    step: int
    steps_lost: int
    side: int
    content: Mapping[str, Any]
    path: Path = Path("memory")

    @property
    def saved_step(self) -> int:
        """See above."""
        return int(self.content["position"]["saved_step"])

    def load(self, map_location: Any = "cpu", *, mapped: Collection[str] = ()) -> dict[str, Any]:
        """The state, by entry: tensors on the CPU, over the snapshot's memory; copy what is to last."""
        return dict(self.content)


def is_kept(run: str) -> bool:
    """Return whether this host has snapshots of a run."""
    heads = [read_head(path) for pair in WorkerFiles.of_this_process().images for path in pair]
    return any(head is not None and head.run == key_of(run) for head in heads)


def find_kept(run: str, files: Sequence[Sequence[str]], local_rank: int) -> MemorySnapshot | None:
    """The newest snapshot of a run that all hosts hold; None when there is none. Called by all ranks.

    A damaged one is reported, and the one before is used.

    Args:
        run: its key.
        files: two paths of each rank of this host, by local rank.
    """
    rank, world_size = place_in_group()
    own = files[local_rank] if files else ()
    heads = [head for head in map(read_head, own) if head is not None and head.run == run]
    mine: dict[str, Any] = {
        "heads": [asdict(head) for head in heads],
        "progress": max(map(read_progress, own), default=-1),
        "local": [local_rank, len(files)],
    }
    everyone = gather_per_rank(mine)
    steps = [_usable_steps(each, place, world_size) for place, each in enumerate(everyone)]
    for step in sorted(set.intersection(*steps), reverse=True):
        side, head = _find(own, run, step)
        damage = ""
        try:
            image_reader.verify(own[side])
        except CheckpointError as error:
            damage = str(error)
        found = {place: text for place, text in enumerate(gather_per_rank(damage)) if text}
        if found:
            if rank == 0:
                text = (
                    f"the snapshot of step {step} is not used: on {name_ranks([*found])}, {next(iter(found.values()))}"
                )
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            continue
        # The ranks of a host may hold it on different sides, where an attempt ended while they began another.
        paths = [pair[_find(pair, run, step)[0]] for pair in files]
        content = image_reader.load(image_reader.open_files(paths), rank)
        states = dict(gather_per_rank((head.rank, content["rng"][head.rank])))
        content["rng"] = [states.get(place) for place in range(head.world_size)]
        progress = max(each["progress"] for each in everyone)
        return MemorySnapshot(step, max(0, progress - step), side, content)
    return None


def _usable_steps(theirs: Mapping[str, Any], rank: int, world_size: int) -> set[int]:
    """The steps of which a rank has a snapshot that fits its place."""
    heads = [Head(**each) for each in theirs["heads"]]
    heads = [head for head in heads if [head.local_rank, head.local_size] == theirs["local"]]
    return {head.step for head in heads if not head.split or (head.rank, head.world_size) == (rank, world_size)}


def _find(pair: Sequence[str], run: str, step: int) -> tuple[int, Head]:
    heads = enumerate(map(read_head, pair))
    return next((side, head) for side, head in heads if head and (head.run, head.step) == (run, step))
