"""What the ranks of tests/gpu do on a command: DistributedDataParallel and its like, on whatever device is there."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import photinus
from photinus.parallel.reducer.bucket_exchange import AverageExchange
from tests.device_thread import backward_as_for_a_gpu
from tests.dist import strategy_cases
from tests.gpu.device import DEVICE, FAKE, HAS_GPU, settle

STEPS, BATCH = 6, 8


def net(norm: bool = True) -> nn.Sequential:
    torch.manual_seed(5)
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8) if norm else nn.Identity(), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 36, 10))


def images(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A global batch: [8, 3, 6, 6] and its classes, made on the CPU so that they are equal everywhere."""
    generator = torch.Generator().manual_seed(step)
    data = torch.randn(BATCH, 3, 6, 6, generator=generator)
    return data, torch.randint(10, (BATCH,), generator=generator)


class TwoHeads(nn.Module):
    """Uses one of two heads; which one is said by the rank and the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk, self.heads = nn.Linear(6, 20), nn.ModuleList(nn.Linear(20, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.trunk(x).relu())  # type: ignore[no-any-return]


def wrapped(model: nn.Module, wrapper: str, **options: Any) -> Any:
    if wrapper == "torch":
        ids = [DEVICE.index] if HAS_GPU else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids, **options)
    ddp = photinus.DistributedDataParallel(model, **options)
    if dist.get_world_size() == 1 and wrapper == "photinus":
        ddp.reducer.use_exchange(AverageExchange(ddp.reducer.average))  # one rank exchanges, too
    return ddp


class Cases(strategy_cases.Cases):
    """The commands of tests/dist/strategy_cases, and those of this folder."""

    strict = False  # CUDA, cuDNN and NCCL have things to say

    def __init__(self, rank: int, world_size: int, address: str) -> None:
        if FAKE:
            backward_as_for_a_gpu()
        super().__init__(rank, world_size, address)

    def ddp(
        self,
        wrapper: str,
        *,
        steps: int = STEPS,
        accumulate: int = 1,
        clip: float | None = None,
        norm: str = "",
        dtype: str = "",
        channels_last: bool = False,
    ) -> dict[str, Any]:
        """Trains on this rank's part of each global batch; the losses of the global batch and what else there is.

        Args:
            wrapper: "photinus", "torch", or "" for the plain model in this process on whole batches.
            accumulate: backwards per step; all but the last in no_sync.
            norm: "photinus" or "torch" for that synchronised batch norm, "" for none.
            dtype: of autocast, "" for none.
        """
        model = net(norm=bool(norm)).to(DEVICE)
        if channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        rank, world_size = (self.rank, self.world_size) if wrapper else (0, 1)
        if norm and wrapper:
            kind = photinus.SyncBatchNorm if norm == "photinus" else nn.SyncBatchNorm
            model = kind.convert_sync_batchnorm(model)  # type: ignore[assignment]
        ddp = wrapped(model, wrapper) if wrapper else model
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        losses: list[torch.Tensor] = []
        places: list[list[int]] = []
        for step in range(steps):
            x, y = (part.chunk(world_size)[rank].to(DEVICE) for part in images(step))
            total = torch.zeros((), device=DEVICE)
            for part, (a, b) in enumerate(zip(x.chunk(accumulate), y.chunk(accumulate), strict=True)):
                last = part == accumulate - 1
                with nullcontext() if last or not wrapper else ddp.no_sync():
                    a = a.contiguous(memory_format=torch.channels_last) if channels_last else a
                    with torch.autocast(DEVICE.type, getattr(torch, dtype)) if dtype else nullcontext():
                        loss = F.cross_entropy(ddp(a), b) / accumulate
                    loss.backward()
                total += loss.detach()
            if clip is not None:
                nn.utils.clip_grad_norm_(ddp.parameters(), clip)
            optimizer.step()
            if wrapper == "photinus":
                places.append([bucket.flat.data_ptr() for bucket in ddp.reducer.buckets])
            optimizer.zero_grad()
            losses.append(total)
        settle()
        means = torch.stack(losses)
        if wrapper and world_size > 1:
            dist.all_reduce(means)
            means /= world_size
        last_layer = list(model.parameters())[-1]
        return {
            "losses": means.tolist(),
            "weights": last_layer.detach().cpu().flatten().tolist(),
            # The second round lays the buckets out anew; from then on their memory has to stay.
            "memory_kept": all(each == places[2] for each in places[2:]),
            "rounds": ddp.reducer.rounds if wrapper == "photinus" else 0,
            "peak": torch.cuda.max_memory_allocated() if HAS_GPU else 0,
        }

    def fsdp(self, sharded: bool = True) -> list[float]:
        """The losses of global batches, with torch's FSDP2, whose exchanges run on streams of its own, or without."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.manual_seed(7)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(4)), nn.Linear(24, 3))
        model = model.to(DEVICE)
        if sharded:
            mesh = init_device_mesh(DEVICE.type, (self.world_size,))
            for layer in [*model, model]:
                fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(STEPS):
            x = torch.randn(BATCH, 24, generator=torch.Generator().manual_seed(step))
            if sharded:
                x = x.chunk(self.world_size)[self.rank]
            loss = model(x.to(DEVICE)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        means = torch.stack(losses)
        if sharded:
            dist.all_reduce(means)
            means /= self.world_size
        return means.tolist()  # type: ignore[no-any-return]

    def unused(self, wrapper: str) -> list[list[float]]:
        """find_unused_parameters with other heads on each rank; the gradients of both heads after each step."""
        ddp = wrapped(TwoHeads().to(DEVICE), wrapper, find_unused_parameters=True)
        told: list[list[float]] = []
        for step in range(4):
            ddp.zero_grad()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + self.rank)).to(DEVICE)
            ddp(x, (self.rank + step) % 2 if step < 3 else 1).square().sum().backward()
            for head in ddp.module.heads:
                gradient = head.weight.grad
                told.append([] if gradient is None else gradient.cpu().flatten().tolist())
        return told

    def join(self, wrapper: str) -> list[float]:
        """Rank 1 has two batches more; the weights afterwards."""
        ddp = wrapped(nn.Linear(4, 2).to(DEVICE), wrapper)
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.fill_(0.1)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for step in range(2 + 2 * self.rank):
                x = torch.full((3, 4), float(step + self.rank), device=DEVICE)
                ddp(x).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [value for p in ddp.parameters() for value in p.detach().cpu().flatten().tolist()]

    def gradients_at_once(self) -> float:
        """Reads averages right after backward, by a kernel of the same stream: they must have been waited for.

        A matrix product before makes sure that the exchange begins late. The largest deviation is returned. All sums
        are of small whole numbers: whatever their order, they are exact.
        """
        size = 2048 if HAS_GPU else 64
        ddp = wrapped(nn.Linear(size, size, bias=False).to(DEVICE), "photinus")
        worst = 0.0
        for step in range(10):
            ddp.zero_grad()
            x = torch.full((size, size), float((self.rank + 1) * (step + 1)), device=DEVICE)
            ddp(x).sum().backward()
            read = ddp.module.weight.grad.clone()
            mean = (step + 1) * size * sum(range(1, self.world_size + 1)) / self.world_size
            worst = max(worst, float((read - mean).abs().max()))
        return worst

    def two_streams(self) -> float:
        """A model whose halves run on two streams; the largest deviation of the gradients from one stream's."""
        torch.manual_seed(self.rank)
        left, right = nn.Linear(256, 256), nn.Linear(256, 256)
        model = nn.ModuleList([left, right]).to(DEVICE)
        plain = copy.deepcopy(model)
        ddp = wrapped(model, "photinus", init_sync=False)
        x = torch.randn(512, 256, device=DEVICE)
        side: Any = torch.cuda.Stream() if HAS_GPU else None  # type: ignore[no-untyped-call]
        worst = 0.0
        for _ in range(5):
            ddp.zero_grad()
            plain.zero_grad()
            settle()
            ddp.reducer.begin_forward()
            one = left(x).square().mean()
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side) if side is not None else nullcontext():
                other = right(x).square().mean()
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)
            (one + other).backward()
            sum(layer(x).square().mean() for layer in plain).backward()  # type: ignore[union-attr]
            for parameter, reference in zip(model.parameters(), plain.parameters(), strict=True):
                assert reference.grad is not None
                wanted = reference.grad.clone()
                dist.all_reduce(wanted)
                wanted /= self.world_size
                worst = max(worst, float((parameter.grad - wanted).abs().max()))
        return worst
