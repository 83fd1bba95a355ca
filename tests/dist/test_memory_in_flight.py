"""Memory that a call reads and writes stays until the call has landed, whatever the caller does meanwhile."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from photinus import engine
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
        self._used: list[np.ndarray[Any, Any]] = []
        self._freed: list[np.ndarray[Any, Any]] = []

    def array(self) -> np.ndarray[Any, Any]:
        memory = np.full(_ELEMS, 4.0, np.float32)
        self._used.append(memory)
        array = memory[:]
        weakref.finalize(array, self._free, memory)
        return array

    def _free(self, memory: np.ndarray[Any, Any]) -> None:
        memory.fill(7)
        self._freed.append(memory)

    def check(self) -> dict[str, int]:
        gc.collect()
        return {
            "in use": len(self._used) - len(self._freed),
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
        dist.abort() if hasattr(dist, "abort") else dist.group.WORLD.abort()
    return found


@pytest.mark.parametrize("kind", ["engine", "torch", "storage"])
def test_a_call_that_is_interrupted_at_any_line_keeps_its_memory_until_it_ends(kind: str, tmp_path: Path) -> None:
    arguments = {"address": engine.new_address(), "store": str(tmp_path / "store"), "kind": kind}
    results = run_ranks(f"{__name__}:interrupted", world_size=2, arguments=arguments)
    assert values(results)[0] == {"in use": 0, "spoilt": 0}
