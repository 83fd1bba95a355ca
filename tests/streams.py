"""Streams of the tests: three kinds, with and without a state; and ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from photinus.trainer.data import loader as loader_file
from photinus.trainer.data import stream as stream_file

LENGTHS = (13, 9, 17, 11)  # samples of four files


def files(number: int, count: int) -> list[int]:
    """The samples of the files of a shard: 100 * file + place."""
    mine = range(len(LENGTHS))[number * len(LENGTHS) // count : (number + 1) * len(LENGTHS) // count]
    return [100 * file + place for file in mine for place in range(LENGTHS[file])]


ALL = files(0, 1)


class Split(IterableDataset[int]):
    """Files that can be split, whose place can be saved: the protocol of datasets and torchdata."""

    num_shards = len(LENGTHS)

    def __init__(self, number: int = 0, count: int = 1) -> None:
        self.samples, self.place, self.epoch, self.read = files(number, count), 0, 0, 0

    def shard(self, num_shards: int, index: int) -> Split:
        return Split(index, num_shards)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        while self.place < len(self.samples):
            self.place += 1
            self.read += 1
            yield self.samples[self.place - 1] + 10_000 * self.epoch
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Whole(IterableDataset[int]):
    """Cannot be split."""

    def __iter__(self) -> Iterator[int]:
        return iter(ALL)


def of_shard(shard: int, shards: int) -> list[int]:
    return files(shard, shards)


KINDS: dict[str, Callable[[], Any]] = {"split": Split, "function": lambda: of_shard, "whole": Whole}


class Threads:
    """Ranks that are threads, and sum over each other by a barrier."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def run(self, world_size: int, work: Callable[[int, int], Any]) -> list[Any]:
        barrier, turn = threading.Barrier(world_size, timeout=60), threading.Lock()
        slots: list[Any] = [None] * world_size
        results: list[Any] = [None] * world_size

        def sums(shares: Any, numbers: list[int]) -> list[int]:
            slots[shares.rank] = numbers
            turn.release()  # one at a time: they share random numbers
            try:
                barrier.wait()
                found = list(slots)
                barrier.wait()
            finally:
                turn.acquire()
            return [sum(each) for each in zip(*found, strict=True)]

        def one(rank: int) -> None:
            try:
                with turn:
                    results[rank] = work(rank, world_size)
            except Exception as error:  # noqa: BLE001 - raised below
                results[rank] = error
                barrier.abort()

        self._patch.setattr(stream_file, "sum_over_ranks", sums)
        self._patch.setattr(loader_file, "compare_descriptions", lambda what, own: None)  # tests/dist has that
        self._patch.setattr(loader_file, "place_in_group", lambda: places[threading.current_thread()])
        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world_size)]
        places = {thread: (rank, world_size) for rank, thread in enumerate(threads)}
        for each in threads:
            each.start()
        for each in threads:
            each.join(timeout=120)
        for found in results:
            if isinstance(found, Exception) and not isinstance(found, threading.BrokenBarrierError):
                raise found
        return results
