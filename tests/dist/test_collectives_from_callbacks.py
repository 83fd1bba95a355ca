"""Collectives of all kinds from several threads, whose callbacks wait for further collectives, never deadlock.

Each of four threads has two groups of its own: of all ranks, or of halves of them (of two ranks: of both). Over one the
thread calls synchronously and not, drops tensors in flight, sends objects and messages. Over the other a chain of
callbacks runs meanwhile, five deep: each starts a collective and waits for the callback of that one. All results are
known, and looked at.
"""

from __future__ import annotations

import faulthandler
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks, values

THREADS = 4
DEPTH = 5


def test_threads_and_nested_callbacks_make_collectives_at_once(tmp_path: Path) -> None:
    soak(2, 2_400, tmp_path, timeout_s=60)


def test_a_callback_that_waits_for_the_main_thread_holds_up_its_calls_for_a_moment_only(tmp_path: Path) -> None:
    arguments = {"store": str(tmp_path / "store")}
    environ = {"PHOTINUS_WAITING_S": "0.3"}
    for value in values(run_ranks(f"{__name__}:_fill_a_queue", world_size=2, environ=environ, arguments=arguments)):
        assert value["sums"] == [2.0, 2.0, 2.0]
        assert value["seconds"] < 5


def _fill_a_queue(rank: int, world_size: int, store: str) -> dict[str, Any]:
    import queue
    import threading
    import warnings

    import torch
    import torch.distributed as dist

    dist.init_process_group("photinus", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    warnings.simplefilter("ignore")
    full: queue.Queue[float] = queue.Queue(1)
    sums: list[float] = []

    def fill(future: Any) -> None:
        total = future.value()[0][0].item()
        if threading.current_thread() is threading.main_thread():  # the future was done when it was asked
            sums.append(total)
        else:
            full.put(total)

    begun_s = time.monotonic()
    for _ in range(3):
        work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
        assert work is not None
        work.get_future().then(fill)
    sums += [full.get(timeout=20) for _ in range(3 - len(sums))]
    took_s = time.monotonic() - begun_s
    dist.destroy_process_group()
    return {"sums": sums, "seconds": took_s}


@pytest.mark.parametrize("profiled", [False, True])
def test_a_collective_of_the_main_thread_follows_those_of_callbacks(profiled: bool) -> None:
    arguments = {"profiled": profiled}
    function = f"{__name__}:_call_beside_callbacks"
    for sums in values(run_ranks(function, world_size=2, backend="photinus", arguments=arguments)):
        assert sums == [[3.0, 30.0]] * 20


def _call_beside_callbacks(rank: int, world_size: int, profiled: bool) -> list[list[float]]:
    """The sums of an all_reduce here and of one in a callback, which rank 1 begins later."""
    import contextlib

    import torch
    import torch.distributed as dist

    def call_later(future: Any) -> float:
        time.sleep(0.01 * rank)
        return all_reduce(10.0 * (rank + 1))

    def all_reduce(value: float) -> float:
        tensor = torch.tensor(value)
        dist.all_reduce(tensor)
        return tensor.item()

    sums = []
    with torch.profiler.profile() if profiled else contextlib.nullcontext():
        for _ in range(20):
            work = dist.all_reduce(torch.ones(1), async_op=True)
            assert work is not None
            called = work.get_future().then(call_later)
            sums.append([all_reduce(rank + 1.0), called.wait()])
    return sums


@pytest.mark.slow
@pytest.mark.timeout(960)
@pytest.mark.parametrize("world_size", [2, 4])
def test_forty_thousand_collectives_from_threads_and_nested_callbacks(world_size: int, tmp_path: Path) -> None:
    soak(world_size, 40_000, tmp_path, timeout_s=900)


def soak(world_size: int, calls: int, folder: Path, *, timeout_s: float) -> None:
    results = run_ranks(
        f"{__name__}:_soak",
        world_size=world_size,
        timeout_s=timeout_s,
        arguments={"store": str(folder / "store"), "calls": calls, "speak_after_s": timeout_s - 10},
    )
    for value in values(results):
        assert value["errors"] == []
        assert value["calls"] >= calls
        assert value["deepest"] == DEPTH
        assert min(value["kinds"].values()) > calls / 200, value["kinds"]
        assert value["threads_left"] == []
    print(f"{world_size} ranks: {calls} calls in {max(value['seconds'] for value in values(results)):.1f} s")


class Caller:
    """What one thread of a rank does; the ranks of its group draw the same calls from the same seed."""

    def __init__(self, rank: int, members: list[int], own: Any, below: Any, seed: int) -> None:
        self.members, self.own, self.below = members, own, below
        self.place, self.size = members.index(rank), len(members)
        self.total = self.size * (self.size + 1) / 2  # the sum of every member's place + 1
        self.random = random.Random(seed)
        self.calls = self.deepest = 0
        self.kinds: dict[str, int] = {}

    def run(self, calls: int) -> None:
        kinds: list[Callable[[], None]] = [
            self.reduced,
            self.dropped,
            self.coalesced,
            self.broadcast,
            self.gathered,
            self.scattered,
            self.exchanged,
            self.objects,
            self.messages,
            self.barrier,
        ]
        while self.calls < calls:
            chain = self.descend(1)
            for _ in range(self.random.randint(1, 12)):
                kind = self.random.choice(kinds)
                kind()
                self.kinds[kind.__name__] = self.kinds.get(kind.__name__, 0) + 1
                self.calls += 1
            chain.wait()
            self.calls += DEPTH + 1  # with the objects at the bottom

    def mine(self, elems: int | None = None) -> Any:
        import torch

        return torch.full((elems or self.random.choice([1, 7, 300, 5000]),), self.place + 1.0)

    def is_equal(self, tensor: Any, value: float) -> None:
        assert tensor.eq(value).all(), f"{value} was expected, {tensor.flatten()[:4].tolist()} came"

    # ---- callbacks that wait

    def descend(self, depth: int) -> Any:
        """The future of a callback that waits for the callback of the next depth."""
        import torch
        import torch.distributed as dist

        work = dist.all_reduce(torch.full((1 + 100 * depth,), self.place + 1.0), group=self.below, async_op=True)

        def arrived(future: Any) -> int:
            self.deepest = max(self.deepest, depth)
            self.is_equal(future.value()[0], self.total)
            if depth < DEPTH:
                self.descend(depth + 1).wait()
            else:
                found: list[Any] = [None] * self.size
                dist.all_gather_object(found, {"place": self.place}, group=self.below)
                assert [item["place"] for item in found] == list(range(self.size))
            return depth

        return work.get_future().then(arrived)

    # ---- the thread's own calls

    def reduced(self) -> None:
        import torch.distributed as dist

        tensor = self.mine()
        op = self.random.choice([dist.ReduceOp.SUM, dist.ReduceOp.MAX])
        dist.all_reduce(tensor, op, group=self.own)
        self.is_equal(tensor, self.total if op == dist.ReduceOp.SUM else self.size)

    def dropped(self) -> None:
        import torch.distributed as dist

        dist.all_reduce(self.mine(), group=self.own, async_op=True)

    def coalesced(self) -> None:
        """Straight to the group, as C++ does, and dropped in three of four cases."""
        from torch._C._distributed_c10d import AllreduceCoalescedOptions

        tensors = [self.mine(3), self.mine(5)]
        work = self.own.allreduce_coalesced(tensors, AllreduceCoalescedOptions())
        if self.random.random() < 0.25:
            work.wait()
            self.is_equal(tensors[1], self.total)

    def broadcast(self) -> None:
        import torch.distributed as dist

        tensor, root = self.mine(), self.random.randrange(self.size)
        dist.broadcast(tensor, self.members[root], group=self.own)
        self.is_equal(tensor, root + 1.0)

    def gathered(self) -> None:
        import torch
        import torch.distributed as dist

        tensor = self.mine()
        parts = [torch.zeros_like(tensor) for _ in self.members]
        work = dist.all_gather(parts, tensor, group=self.own, async_op=True)
        work.wait()
        for place, part in enumerate(parts):
            self.is_equal(part, place + 1.0)

    def scattered(self) -> None:
        import torch
        import torch.distributed as dist

        output = torch.zeros(16)
        dist.reduce_scatter_tensor(output, self.mine(16 * self.size), group=self.own)
        self.is_equal(output, self.total)

    def exchanged(self) -> None:
        import torch
        import torch.distributed as dist

        output = torch.zeros(4 * self.size)
        dist.all_to_all_single(output, self.mine(4 * self.size), group=self.own)
        self.is_equal(output.view(self.size, 4) - torch.arange(1.0, self.size + 1)[:, None], 0.0)

    def objects(self) -> None:
        import torch.distributed as dist

        root = self.random.randrange(self.size)
        said = [("from", self.place), None]
        dist.broadcast_object_list(said, self.members[root], group=self.own)
        assert said == [("from", root), None]

    def messages(self) -> None:
        """Around the ring."""
        import torch
        import torch.distributed as dist

        output, tensor = torch.zeros(9), self.mine(9)
        before, after = self.members[self.place - 1], self.members[(self.place + 1) % self.size]
        works = [dist.isend(tensor, after, group=self.own), dist.irecv(output, before, group=self.own)]
        for work in works:
            assert work is not None
            work.wait()
        self.is_equal(output, (self.place - 1) % self.size + 1.0)

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier(group=self.own)


def _soak(rank: int, world_size: int, store: str, calls: int, speak_after_s: float) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(speak_after_s)  # every thread's place, should it hang
    before = set(threading.enumerate())
    shared = dist.FileStore(store, world_size)
    dist.init_process_group("photinus", store=shared, rank=rank, world_size=world_size)
    everyone = list(range(world_size))
    halves = [everyone[::2], everyone[1::2]] if world_size > 2 else [everyone]
    neighbours = [everyone[:2], everyone[2:]] if world_size > 2 else [everyone]
    callers = []
    for thread, division in enumerate([[everyone], halves, [everyone], neighbours]):
        for seed, members in enumerate(division):
            own, below = dist.new_group(members), dist.new_group(members)
            if rank in members:
                callers.append(Caller(rank, members, own, below, seed=10 * thread + seed))
    assert len(callers) == THREADS
    errors: list[str] = []

    def run(caller: Caller) -> None:
        try:
            caller.run(-(-calls // THREADS))
        except BaseException as error:  # noqa: BLE001 - handed to the test
            errors.append(f"{type(error).__name__}: {error}")

    started = time.monotonic()
    threads = [threading.Thread(target=run, args=(caller,)) for caller in callers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - started
    kinds: dict[str, int] = {}
    for caller in callers:
        for name, count in caller.kinds.items():
            kinds[name] = kinds.get(name, 0) + count
    if not errors:
        dist.barrier()
        dist.destroy_process_group()
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    faulthandler.cancel_dump_traceback_later()
    return {
        "errors": errors,
        "calls": sum(caller.calls for caller in callers),
        "deepest": min(caller.deepest for caller in callers),
        "kinds": kinds,
        "seconds": seconds,
        "threads_left": left,
    }
