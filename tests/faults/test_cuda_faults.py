"""Ranks that end while calls on CUDA tensors are in flight, without a GPU: over the driver that is none."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from functools import partial
from typing import Any

import pytest

from photinus.errors import PeerLostError
from tests.fake_cuda import FakeGpu, library
from tests.ranks import RanksFailedError, run_ranks, values

SLOW_COPIES = " ".join(f"lasts=cuMemcpy{way}Async:{n}:150" for way in ("HtoD", "DtoH") for n in range(1, 3))
NEVER_ENDING_COPY = "lasts=cuMemcpyDtoHAsync:1:1000000"


@pytest.mark.parametrize("how", ["destroy", "exit", "drop"])
@pytest.mark.parametrize("words", [SLOW_COPIES, NEVER_ENDING_COPY], ids=["slow", "sick"])
def test_ranks_that_end_in_mid_copy_neither_hang_nor_crash(how: str, words: str) -> None:
    library()
    run = partial(run_ranks, f"{__name__}:_ends", world_size=2, backend="photinus", timeout_s=40)
    if words == SLOW_COPIES or how == "destroy":
        assert all("terminate called" not in result.output for result in run(arguments={"how": how, "words": words}))
        return
    # The copy never ends: the rank that is left last may say that its call has failed.
    text = ""
    try:
        run(arguments={"how": how, "words": words})
    except RanksFailedError as failed:
        text = str(failed)
    if text:
        assert "nobody has waited for a call that failed" in text
        assert set(re.findall(r"----- rank \d: (.*)", text)) == {"exit code 0", "exit code 1"}


def _ends(rank: int, world_size: int, how: str, words: str) -> None:
    import torch
    import torch.distributed as dist

    gpu = FakeGpu(words)
    work = dist.all_reduce(gpu.tensor(torch.ones(1000)), async_op=True)
    if how == "destroy":
        with contextlib.suppress(PeerLostError):
            dist.destroy_process_group()
        assert work is not None
        with contextlib.suppress(RuntimeError):  # what ends within a second is waited for
            work.wait()
        os._exit(0)  # not again
    if how == "exit":
        sys.exit(0)


def test_a_rank_that_is_killed_in_mid_copy_is_named_with_its_gpu_within_a_second() -> None:
    library()
    results = run_ranks(
        f"{__name__}:_killed", world_size=3, backend="photinus", timeout_s=40, expect={1: -signal.SIGKILL}
    )
    for survivor in (results[0], results[2]):
        error, took_s, total = survivor.value
        assert f"rank 1 (pid {results[1].pid}" in error
        assert "with tensors on GPU 0 (Fake, 0000:01:00.0), was killed by SIGKILL" in error
        assert took_s < 1.0
        assert total == 2.0  # the GPU and a further group of the survivors
    assert len(values(results)) == 3


def _killed(rank: int, world_size: int) -> list[Any]:
    import torch
    import torch.distributed as dist

    gpu = FakeGpu(" ".join(f"lasts=cuMemcpyDtoHAsync:{n}:1300" for n in (2, 3)))
    rest = dist.new_group([0, 2])
    x = gpu.tensor(torch.ones(1000))
    dist.all_reduce(x)
    started = time.monotonic()
    work = dist.all_reduce(x, async_op=True)
    if rank == 1:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    assert work is not None
    error = "no error"
    try:
        work.wait()
    except RuntimeError as raised:
        error = str(raised)
    took_s = time.monotonic() - started - 0.1
    y = gpu.tensor(torch.ones(10))
    dist.all_reduce(y, group=rest)
    return [error, took_s, float(gpu.read(y)[0])]
