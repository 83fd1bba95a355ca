"""Reads images (see image.py), and finds the newest snapshot in memory for a loop that starts again."""

from __future__ import annotations

import io
import json
import math
import mmap
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...job.worker_files import HEAD_BYTES, Head, WorkerFiles, key_of, read_head, read_progress
from ...job.world import name_ranks
from ...parallel.exchange.agreement import gather_per_rank, place_in_group
from .image import CUT, PLACE, PLAIN_ITEMS, align, cut_range, digest_of


def verify(path: str) -> mmap.mmap:
    """Read all of a file, and return its memory. Raises CheckpointError: it is not sealed, or its digest differs."""
    head = read_head(path)
    if head is None:
        raise CheckpointError(f"{path} holds no sealed image, or its head is damaged")
    try:
        memory = _map(path, head)
        actual = digest_of(memory)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if actual != head.digest:
        raise CheckpointError(f"{path} is damaged: digest expected {head.digest}, actual {actual}")
    return memory


def load(files: Sequence[File], rank: int | None = None) -> dict[str, Any]:
    """The content of an image whose files have been verified; tensors lie over the files' memory: copy what is to last.

    Args:
        files: of a host, by local rank.
        rank: only this rank's parts of split tensors are filled in (memory for others is never taken), and what ranks
            have of their own is this rank's. None: all ranks of the job are here, and all is whole.

    Raises:
        CheckpointError: a part is missing.
    """
    own_first = sorted(files, key=lambda file: (file.head.rank != rank, file.head.rank))
    content: dict[str, Any] = Reader(files, rank).join([files[0].common, *(file.own for file in own_first)])
    return content


def open_files(paths: Sequence[str], maps: Mapping[str, mmap.mmap] | None = None) -> list[File]:
    """The files of one image on this host, by local rank. Raises CheckpointError where they do not belong together.

    Args:
        maps: memory of some, from `verify`: to map 100 MB again takes 20 ms.
    """
    heads = [read_head(path) for path in paths]
    for local_rank, head in enumerate(heads):
        place = heads[0] and replace(heads[0], local_rank=local_rank, local_size=len(paths))
        alike = ("run", "step", "world_size", "cut_bytes", "local_rank", "local_size")
        if head is None or any(getattr(head, name) != getattr(place, name, None) for name in alike):
            raise CheckpointError(f"{paths[local_rank]} holds another image than {paths[0]}: {head} and {heads[0]}")
    maps = maps or {}
    return [File(path, head, maps.get(path)) for path, head in zip(paths, heads, strict=True) if head is not None]


def _map(path: str, head: Head) -> mmap.mmap:
    with open(path, "rb") as file:  # what is read may be changed, without changing the file
        return mmap.mmap(file.fileno(), head.bytes, access=mmap.ACCESS_COPY)


def read_skeleton(data: bytes, path: str) -> tuple[Any, Any]:
    """The skeletons of what is common and of a rank's own. Raises CheckpointError; nothing in it is run."""
    try:
        skeleton = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return skeleton["common"], skeleton["own"]
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


class File:
    """One file to read.

    Attributes:
        common, own: skeletons; the first is None but of local rank 0.
    """

    def __init__(self, path: str, head: Head, memory: mmap.mmap | None = None) -> None:
        self.head, self.memory = head, memoryview(memory or _map(path, head))
        self.common, self.own = read_skeleton(bytes(self.memory[HEAD_BYTES : HEAD_BYTES + head.skeleton_bytes]), path)
        self.cut_at = align(HEAD_BYTES + head.skeleton_bytes)
        self.start, self.end = cut_range(head.cut_bytes, head.local_rank, head.local_size)
        self.own_at = align(self.cut_at + self.end - self.start)


class Reader:
    """Joins the skeletons of several ranks to one content (see `Content`), with tensors in the places."""

    def __init__(self, files: Iterable[File], rank: int | None = None) -> None:
        self._files, self._rank = {file.head.rank: file for file in files}, rank
        self._tensors: dict[Any, torch.Tensor] = {}  # what was one tensor under two names stays one

    def join(self, trees: Sequence[Any]) -> Any:
        """One tree of those of several ranks, of which the first counts."""
        first = trees[0]
        if isinstance(first, str) and first.startswith(PLACE):
            texts = tuple(trees)
            if texts not in self._tensors:
                places = [json.loads(text.removeprefix(PLACE)) for text in texts]
                is_split = len(places[0]) > PLAIN_ITEMS
                self._tensors[texts] = self._whole(places) if is_split else self._tensor(places[0])
            return self._tensors[texts]
        if isinstance(first, dict):
            trees = [tree for tree in trees if isinstance(tree, dict)]
            keys = list(dict.fromkeys(key for tree in trees for key in tree))
            if len(keys) > len(first) and all(isinstance(key, int) for key in keys):
                keys.sort()  # the optimizer's parameters, in the order of its groups
            joined = type(first)()
            vars(joined).update(vars(first)) if hasattr(first, "__dict__") else None  # _metadata
            for key in keys:
                joined[key] = self.join([tree[key] for tree in trees if key in tree])
            return joined
        if type(first) in (list, tuple):
            alike = [tree for tree in trees if type(tree) is type(first) and len(tree) == len(first)]
            return type(first)(self.join(items) for items in zip(*alike, strict=True))
        return first

    def _tensor(self, place: Sequence[Any]) -> torch.Tensor:
        shape, stride, dtype = place[3], place[4], _dtype(place)
        pieces = [torch.frombuffer(piece, dtype=torch.uint8) for piece in self.pieces(place)]
        if not pieces:
            assert not math.prod(shape), "a tensor of another host's"
            return torch.empty_strided(shape, stride, dtype=dtype)
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return whole.view(dtype).as_strided(shape, stride)

    def pieces(self, place: Sequence[Any]) -> list[memoryview]:
        """The bytes of a tensor, one behind the other, as far as they are in these files."""
        area, at, size = place[0], place[1], math.prod(place[3]) * _dtype(place).itemsize
        if not size:
            return []
        if area != CUT:
            file = self._files.get(area)
            return [] if file is None else [file.memory[file.own_at + at :][:size]]
        parts = []
        for file in self._files.values():
            start, end = max(at, file.start), min(at + size, file.end)
            if start < end:
                offset = file.cut_at + start - file.start
                parts.append(file.memory[offset : offset + end - start])
        return parts

    def _whole(self, places: Sequence[Sequence[Any]]) -> torch.Tensor:
        """A whole tensor of its parts. Pages that nothing is written to cost nothing."""
        whole, filled = torch.empty(places[0][PLAIN_ITEMS], dtype=_dtype(places[0])), 0
        for place in places:
            if self._rank is None or place[0] == self._rank:
                part = whole.as_strided(*place[PLAIN_ITEMS + 1 :])
                part.copy_(self._tensor(place))
                filled += part.numel()
        if self._rank is None and filled < whole.numel():
            raise CheckpointError(f"parts of a split tensor of shape {[*whole.shape]} lie on other hosts")
        return whole


def _dtype(place: Sequence[Any]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, place[2].removeprefix("torch."))
    return dtype


@dataclass(frozen=True)
class MemorySnapshot:
    """A snapshot that all hosts hold, whole and verified. A loop loads it like a `Checkpoint`.

    Attributes:
        step: of the training.
        steps_lost: number of finished steps after it.
        path: always `memory`; a checkpoint has its folder here.
        saved_step: the step of the last checkpoint that was begun before.
        side: of this rank's two files, the one that has it.
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
            mapped = {own[side]: verify(own[side])}
        except CheckpointError as error:
            damage = str(error)
        found = {place: text for place, text in enumerate(gather_per_rank(damage)) if text}
        if found:
            if rank == 0:
                text = f"on {name_ranks([*found])}, {next(iter(found.values()))}"
                warnings.warn(f"the snapshot of step {step} is not used: {text}", RuntimeWarning, stacklevel=2)
            continue
        # The ranks of a host may hold it on different sides, where an attempt ended while they began another.
        paths = [pair[_find(pair, run, step)[0]] for pair in files]
        content = load(open_files(paths, mapped), rank)
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
