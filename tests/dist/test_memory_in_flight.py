"""Memory that a call reads and writes stays until the call has landed, whatever the caller does meanwhile."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from photinus import engine, errors
from tests.ranks import run_ranks, values

_PACKAGE = str(Path(engine.__file__).parent)
_ELEMS = 20_000


class _StopError(Exception):
    """Raised in place of the next line, as a signal's handler may."""


def _interrupt_at_line(number: int, call: Callable[[], object]) -> bool:
    """Makes a call and raises in place of its `number`-th line of photinus; whether it came to that."""
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise _StopError
        return trace

    sys.settrace(trace)
    try:
        call()
    except _StopError:
        return True
    finally:
        sys.settrace(None)
    return False


class _Pool:
    """Arrays whose memory is somebody else's as soon as they are dropped: 7 is written there, and should stay."""

    def __init__(self) -> None:
        self._arrays: list[weakref.ref[Any]] = []
        self._freed: list[np.ndarray[Any, Any]] = []

    def array(self) -> np.ndarray[Any, Any]:
        memory = np.full(_ELEMS, 4.0, np.float32)
        array = memory[:]
        self._arrays.append(weakref.ref(array, lambda _: self._free(memory)))
        return array

    def _free(self, memory: np.ndarray[Any, Any]) -> None:
        memory.fill(7)
        self._freed.append(memory)

    def check(self) -> dict[str, int]:
        gc.collect()
        return {
            "in use": sum(array() is not None for array in self._arrays),
            "spoilt": sum(bool((memory != 7).any()) for memory in self._freed),
        }


def _torch_group(rank: int, world_size: int, store: str) -> Any:
    import torch.distributed as dist

    dist.init_process_group("photinus", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    return dist


def interrupted(rank: int, world_size: int, address: str, store: str, kind: str) -> dict[str, int]:
    """Rank 0 is interrupted at each line of a call whose array it then drops, before rank 1 makes its own calls."""
    pool, start = _Pool(), Path(store + "-start")
    if kind == "engine":
        communicator = engine.Communicator(rank, world_size, address, timeout_s=60)

        def call(array: Any) -> Any:
            return communicator.all_reduce(array, asynchronous=True)
    else:
        import torch

        dist = _torch_group(rank, world_size, store)

        def call(array: Any) -> Any:
            work = dist.all_reduce(tensor := torch.from_numpy(array), async_op=True)
            if kind == "storage":
                tensor.data = torch.zeros(1)
            return work

    if rank == 1:
        while not start.exists():
            time.sleep(0.01)
        for _ in range(100):
            call(np.full(_ELEMS, 4.0, np.float32)).wait()
        Path(store + "-done").touch()
        while not Path(store + "-over").exists():  # else those of rank 0 that are too many fail
            time.sleep(0.01)
        return {}
    number = 0
    while True:
        number += 1
        array = pool.array()
        if not _interrupt_at_line(number, lambda array=array: call(array)):
            break
        del array
        gc.collect()
    assert number > 4
    assert number < 90
    del array
    start.touch()
    last = None
    while not Path(store + "-done").exists():  # how many of the calls had begun is not known
        last = call(np.full(_ELEMS, 4.0, np.float32))
        time.sleep(0.002)
    assert last is not None
    found = pool.check()
    if kind == "engine":
        communicator.abort("the test is over")
        communicator.close()
    else:
        dist.group.WORLD.abort()
    Path(store + "-over").touch()
    return found


@pytest.mark.parametrize("kind", ["engine", "storage", pytest.param("torch", marks=pytest.mark.slow)])
def test_a_call_that_is_interrupted_at_any_line_keeps_its_memory_until_it_ends(kind: str, tmp_path: Path) -> None:
    arguments = {"address": engine.new_address(), "store": str(tmp_path / "store"), "kind": kind}
    results = run_ranks(f"{__name__}:interrupted", world_size=2, arguments=arguments)
    assert values(results)[0] == {"in use": 0, "spoilt": 0}


def harmed(rank: int, world_size: int, store: str, moments: int) -> dict[str, Any]:
    """Signals whose handler raises at random moments of calls and of asking for futures; threads that do not start."""
    import torch

    dist, pool = _torch_group(rank, world_size, store), _Pool()
    if rank == 1:
        with contextlib.suppress(errors.CollectiveError):
            while True:
                dist.all_reduce(torch.from_numpy(np.full(_ELEMS, 4.0, np.float32)))
        return {}
    chosen, start, is_armed = random.Random(7), threading.Thread.start, False
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    def stop(*_: Any) -> None:
        if is_armed:
            raise _StopError

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    signal.signal(signal.SIGALRM, stop)
    found = {"stopped": 0, "refused": 0, "open": 0}
    futures: list[Any] = []
    for _ in range(moments):
        threading.Thread.start = fail if chosen.random() < 0.2 else start  # type: ignore[method-assign]
        try:
            try:
                is_armed = True
                signal.setitimer(signal.ITIMER_REAL, chosen.uniform(1e-6, 2e-4))
                work = dist.all_reduce(torch.from_numpy(pool.array()), async_op=True)
                future = work.get_future()
                futures.append(future)
                future.wait()
            finally:
                is_armed = False
        except _StopError:
            found["stopped"] += 1
        except RuntimeError:  # no thread
            found["refused"] += 1
        work = future = None
    signal.setitimer(signal.ITIMER_REAL, 0)
    threading.Thread.start = start  # type: ignore[method-assign]
    deadline = time.monotonic() + 20
    while not all(future.done() for future in futures) and time.monotonic() < deadline:
        time.sleep(0.01)
    found["open"] = sum(not future.done() for future in futures)
    futures.clear()
    while pool.check()["in use"] and time.monotonic() < deadline:
        time.sleep(0.01)
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, []) != before
    dist.group.WORLD.abort()
    return {**found, **pool.check(), "masked": masked}


@pytest.mark.parametrize("moments", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_interruptions_and_failed_threads_leave_no_future_open_and_spoil_nothing(
    moments: int, tmp_path: Path
) -> None:
    arguments = {"store": str(tmp_path / "store"), "moments": moments}
    found = values(run_ranks(f"{__name__}:harmed", world_size=2, arguments=arguments, timeout_s=100))[0]
    assert found.pop("stopped") > moments / 10
    assert found.pop("refused") >= 0  # where the thread of the call before was gone
    assert found == {"open": 0, "in use": 0, "spoilt": 0, "masked": False}


def kept(rank: int, world_size: int, store: str) -> list[int]:
    import torch

    dist = _torch_group(rank, world_size, store)
    arrays: list[weakref.ref[Any]] = []

    def make() -> Any:
        array = np.ones(1 << 16, np.float32)
        arrays.append(weakref.ref(array))
        return torch.from_numpy(array)

    for _ in range(40):
        dist.all_reduce(make()[:1], async_op=True).wait()
    views = sum(array() is not None for array in arrays)
    for _ in range(40):
        values = make().requires_grad_()
        dist.all_reduce((values * values).sum(), async_op=True).wait()
    del values
    gc.collect()
    return [views, sum(array() is not None for array in arrays)]


def test_calls_that_have_ended_keep_no_storage_of_a_view_and_no_graph(tmp_path: Path) -> None:
    arguments = {"store": str(tmp_path / "store")}
    assert values(run_ranks(f"{__name__}:kept", world_size=1, arguments=arguments)) == [[0, 0]]
