"""A rank of benchmarks/saving.py: trains, saves by one method every few steps, and reports the times of its steps."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import photinus
from photinus.trainer.checkpoint.writer import FILE_WRITER, WRITER

IsDone = Callable[[], bool]


def save_by_photinus(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> IsDone:
    """photinus.save(wait=False)."""
    photinus.save(folder / "state.pt", wait=False, model=model, optimizer=optimizer)
    return lambda: not FILE_WRITER.is_busy or FILE_WRITER.has_answered


def save_by_torch(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> IsDone:
    """torch.save by rank 0, durably; the others wait."""
    if dist.get_rank() == 0:
        with open(folder / "state.pt", "wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            os.fsync(file.fileno())
    dist.barrier()
    return lambda: True


def save_by_dcp(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> IsDone:
    """torch.distributed.checkpoint.async_save."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    shutil.rmtree(folder / "dcp", ignore_errors=True)
    with contextlib.redirect_stderr(None):
        future: Any = dcp.async_save(state, checkpoint_id=str(folder / "dcp"))
    return future.done  # type: ignore[no-any-return]


def save_by_accelerate(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> IsDone:
    """Accelerator.save_state."""
    import accelerate

    global _accelerator
    if _accelerator is None:
        _accelerator = accelerate.Accelerator(cpu=True)
        _accelerator._models, _accelerator._optimizers = [model], [optimizer]
    _accelerator.save_state(str(folder / "accelerate"), safe_serialization=False)
    return lambda: True


_accelerator: Any = None
METHODS = {
    "photinus": save_by_photinus,
    "torch.save": save_by_torch,
    "DCP async_save": save_by_dcp,
    "Accelerate": save_by_accelerate,
}


LOOPS = {"Loop": "ddp", "Loop zero3": "zero3"}
_STEPS_OF_SAVE = 25


def measure_loop(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str, saves: int, width: int) -> None:
    """Prints what `main` prints, for a photinus.Loop that saves every few steps; the first save starts the writer."""
    save = photinus.Saving(every_steps=_STEPS_OF_SAVE, keep_last=1, snapshot_every=0)
    report, steps = photinus.Reporting(progress=False, curves=False), _STEPS_OF_SAVE * (saves + 2)
    data = torch.utils.data.TensorDataset(torch.randn(8 * steps, width))  # one epoch, which ends with a save, too
    loop = photinus.Loop(model, optimizer, data, batch_size=8, steps=steps, out=folder, save=save, report=report)
    times: list[tuple[int, bool, float]] = []
    began_s = 0.0
    for (inputs,) in loop:
        was_busy = WRITER.is_busy and not WRITER.has_answered
        times.append((loop.step - 1, was_busy, time.perf_counter() - began_s))
        began_s = time.perf_counter()
        loop.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    times = [each for each in times if each[0] > _STEPS_OF_SAVE]
    blocks = [each for each in times if each[0] % _STEPS_OF_SAVE == 0]
    alone = [seconds for step, busy, seconds in times if not busy and step % _STEPS_OF_SAVE]
    beside = [seconds for step, busy, seconds in times if busy and step % _STEPS_OF_SAVE]
    blocked = [seconds - statistics.median(alone) for _, _, seconds in blocks]
    if dist.get_rank() == 0:
        print(json.dumps({"alone": alone, "beside": beside, "blocked": blocked}), flush=True)


def main(method: str, folder: str, saves: int, width: int) -> None:
    """Prints a line of JSON on rank 0: seconds of the steps without a save, of those during one, and of the blocks."""
    with photinus.init("auto" if int(os.environ["WORLD_SIZE"]) > 1 else "gloo", "cpu", seed=0):
        plain = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(5)))
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-5)
        model, optimizer = photinus.wrap(plain, optimizer, strategy=LOOPS.get(method, "ddp"))
        if method in LOOPS:
            measure_loop(model, optimizer, folder, saves, width)
            return
        inputs = torch.randn(8, width)

        def step() -> float:
            began_s = time.perf_counter()
            photinus.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return time.perf_counter() - began_s

        for _ in range(5):
            step()
        METHODS[method](Path(folder), plain, optimizer)  # starts what it needs
        time.sleep(10)
        alone: list[float] = []
        beside: list[float] = []
        blocked: list[float] = []
        for _ in range(saves):
            alone += [step() for _ in range(12)]
            began_s = time.perf_counter()
            is_done = METHODS[method](Path(folder), plain, optimizer)
            blocked.append(time.perf_counter() - began_s)
            done = torch.zeros(1)
            while not done:
                beside.append(step())
                done.fill_(float(is_done()))
                dist.broadcast(done, 0)
        if dist.get_rank() == 0:
            print(json.dumps({"alone": alone, "beside": beside, "blocked": blocked}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
