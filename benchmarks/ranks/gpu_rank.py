"""A rank of gpu_collectives.py: all contestants in one process, in groups of their own, with turns on command."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks.added_on_gpu import AddedOnGpu
from photinus.run.local.devices import usable_cores
from photinus.tools.doctor.backend_rank import through_host
from tests.fake_cuda import FakeGpu, RealGpu
from tests.gpu.device import DEVICE, HAS_GPU, settle

GPU_ADDS = "added on the GPU"
COPIES, HOST_COPY = "copies", "copy in host memory"


class Reductions:
    """Without a GPU ours has tensors that pass for a GPU's, over the driver that is none, and the others the CPU's."""

    def __init__(self, rank: int, world_size: int, address: str) -> None:
        torch.set_num_threads(max(1, usable_cores() // world_size))  # one does not fill the memory's channels
        self.rank, self.world_size = rank, world_size
        if HAS_GPU:
            torch.cuda.set_device(DEVICE)
        self.gpu: Any = RealGpu() if HAS_GPU else FakeGpu("seed=3")
        store = dist.FileStore(os.environ["STORE_OF_TEST"], world_size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        self.ours: Any = dist.new_group(backend="photinus")
        self.calls: dict[str, Callable[[], object]] = {}
        self.prototype: AddedOnGpu | None = None

    def __call__(self, command: dict[str, Any]) -> Any:
        return getattr(self, command.pop("do"))(**command)

    def prepare(self, names: list[str], size_bytes: int, dtype: str, pieces: int) -> None:
        """Frees the tensors, makes those of each contestant, and checks one sum of each that reduces."""
        self.calls.clear()
        if self.prototype is not None:
            self.prototype.close()
            self.prototype = None
        if HAS_GPU:
            torch.cuda.empty_cache()
        kind = getattr(torch, dtype)
        for name in names:
            tensors = [torch.ones(size_bytes // kind.itemsize // pieces, dtype=kind) for _ in range(pieces)]
            if name == "photinus":
                tensors = [self.gpu.tensor(each) for each in tensors]
            elif name != HOST_COPY:
                tensors = [each.to(DEVICE) for each in tensors]
            self.calls[name] = call = self._call(name, tensors)
            call()
            self._settle()
            if name in (COPIES, HOST_COPY):
                continue
            expected = float(self.world_size)
            seen = [self.gpu.read(each) if name == "photinus" else each for each in tensors]
            if not all(bool((each == expected).all()) for each in seen):
                raise AssertionError(f"{name}: the sum of {self.world_size} ones came out otherwise")
            for each in tensors:
                each.zero_()  # so that sums stay finite

    def _call(self, name: str, tensors: list[torch.Tensor]) -> Callable[[], object]:
        first = tensors[0]
        if name == COPIES:
            copies = [through_host(each) for each in tensors]
            return lambda: [copy() for copy in copies]
        if name == HOST_COPY:
            there = [each.clone() for each in tensors]
            return lambda: [to.copy_(each) for to, each in zip(there, tensors, strict=True)]
        if name == GPU_ADDS:
            folder = "/dev/shm" if os.path.isdir("/dev/shm") else str(Path(os.environ["STORE_OF_TEST"]).parent)
            path = Path(folder, f"photinus-{os.getppid()}-{first.numel()}")
            self.prototype = AddedOnGpu(first, self.rank, self.world_size, path, dist.barrier)
            return self.prototype
        group = self.ours if name == "photinus" else None

        def reduce() -> None:
            works = [dist.all_reduce(each, group=group, async_op=True) for each in tensors]
            for work in works:
                work.wait()

        return reduce

    def _settle(self) -> None:
        settle()
        if not HAS_GPU:
            self.gpu.settle()

    def turn(self, name: str, count: int) -> dict[str, float]:
        """Seconds of a call and of all this process's threads in it, back to back."""
        call = self.calls[name]
        call()
        self._settle()
        dist.barrier()
        cpu, began = time.process_time(), time.perf_counter()
        for _ in range(count):
            call()
        self._settle()
        return {"s": (time.perf_counter() - began) / count, "cpu_s": (time.process_time() - cpu) / count}
