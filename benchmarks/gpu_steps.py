"""Our DistributedDataParallel beside torch's on a GPU: whole training steps, taking turns in one run.

    python benchmarks/gpu_steps.py            a stage of `make gpu`; writes steps.json into the folder GPU_OUT

One rank over NCCL, and two that share the GPU over gloo. A step is forward, backward with the exchange, SGD, and
gradients set to None, in float32 with TF32. With one rank ours exchanges nothing; "ours, exchanging" is made to, as
torch's always does. For each: milliseconds of a step; the host's time to queue one (ours is Python, torch's C++); and
what the GPU's stream waited for averages when backward was over, by events.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests.rank_pool starts the ranks

import torch
import torch.distributed as dist
from torch import nn

import photinus
from benchmarks.gpu_results import tell
from benchmarks.ranks import models
from photinus.parallel.reducer.bucket_exchange import AverageExchange
from tests.gpu.device import DEVICE, FAKE, HAS_GPU, settle
from tests.rank_pool import RankError, RankPool

MODELS = ["many-small:1"] if FAKE else ["gpt-2-small:8x128", "resnet-50:128", "many-small:1"]
ROUNDS = {1: 3, 2: 3} if FAKE else {1: 9, 2: 5}
TURN_S = 0.05 if FAKE else 0.4
SLOWER = 0.02
"""By more than this ours may not be slower than torch's."""


class Steps:
    """A rank: builds the contestants of a model, and takes turns on command."""

    def __init__(self, rank: int, world_size: int, address: str) -> None:
        self.rank, self.world_size = rank, world_size
        if HAS_GPU:
            torch.cuda.set_device(DEVICE)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        store = dist.FileStore(os.environ["STORE_OF_TEST"], world_size)
        dist.init_process_group(os.environ["BACKEND_OF_TEST"], store=store, rank=rank, world_size=world_size)
        self.steps: dict[str, Callable[[], None]] = {}
        self.wrapped: dict[str, Any] = {}

    def __call__(self, command: dict[str, Any]) -> Any:
        return getattr(self, command.pop("do"))(**command)

    def prepare(self, model: str) -> list[str]:
        self.steps.clear()
        self.wrapped.clear()
        if HAS_GPU:
            torch.cuda.empty_cache()
        for name in ("torch", "ours", *(("ours, exchanging", "no wrapper") if self.world_size == 1 else ())):
            net, inputs = models.make(model)
            net, inputs = net.to(DEVICE), tuple(each.to(DEVICE) for each in inputs)
            ddp: Any = net
            if name == "torch":
                ddp = nn.parallel.DistributedDataParallel(net)
            elif name != "no wrapper":
                ddp = photinus.DistributedDataParallel(net)
                if name == "ours, exchanging":
                    ddp.reducer.use_exchange(AverageExchange(ddp.reducer.average))
            self.wrapped[name] = ddp
            self.steps[name] = step_of(ddp, torch.optim.SGD(ddp.parameters(), lr=1e-6), inputs)
            for _ in range(3):
                self.steps[name]()
            settle()
        return list(self.steps)

    def turn(self, name: str, count: int) -> dict[str, float]:
        """Seconds of a step, and of them the host's until all was queued."""
        step = self.steps[name]
        dist.barrier()
        settle()
        began = time.perf_counter()
        for _ in range(count):
            step()
        queued = time.perf_counter()
        settle()
        return {"step_s": (time.perf_counter() - began) / count, "queued_s": (queued - began) / count}

    def waited(self, name: str) -> float | None:
        """Seconds in which the stream waited for averages when a backward was over; None without an exchange."""
        ask = getattr(self.wrapped[name], "_get_ddp_logging_data", None)
        if ask is None:
            return None
        self.wrapped[name]._set_ddp_runtime_logging_sample_rate(1)
        for _ in range(12):
            self.steps[name]()
            settle()
        data = ask()
        exchange = data.get("avg_backward_comm_time", 0)
        return max(0, exchange - data.get("avg_backward_compute_comm_overlap_time", 0)) / 1e9 if exchange else None


def step_of(ddp: Any, optimizer: torch.optim.Optimizer, inputs: tuple[torch.Tensor, ...]) -> Callable[[], None]:
    """A training step."""

    def step() -> None:
        ddp(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(pool: RankPool, model: str, rounds: int) -> dict[str, Any]:
    """The medians of all contestants, from turns that alternate."""
    names = pool.ask({"do": "prepare", "model": model})[0]
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    counts = {}
    for name in names:
        seconds = max(told["step_s"] for told in pool.ask({"do": "turn", "name": name, "count": 3}))
        counts[name] = max(2, int(TURN_S / seconds))
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            told = pool.ask({"do": "turn", "name": name, "count": counts[name]})
            turns[name].append({key: max(each[key] for each in told) for key in told[0]})
    figures: dict[str, Any] = {}
    for name in names:
        # Of the turns of one round the ratio counts: what disturbs one disturbs its neighbour.
        ratios = [ours["step_s"] / theirs["step_s"] for ours, theirs in zip(turns[name], turns["torch"], strict=True)]
        figures[name] = {
            "step_ms": statistics.median(each["step_s"] for each in turns[name]) * 1e3,
            "queued_ms": statistics.median(each["queued_s"] for each in turns[name]) * 1e3,
            "to_torch": statistics.median(ratios),
            "waited_ms": max(
                (each * 1e3 for each in pool.ask({"do": "waited", "name": name}) if each is not None), default=None
            ),
        }
    return figures


def _words(name: str, each: dict[str, Any]) -> str:
    waited = "" if each["waited_ms"] is None else f", waited {each['waited_ms']:.2f}"
    return f"{name}: {each['step_ms']:.2f} ms ({each['to_torch']:.3f} x torch), queued {each['queued_ms']:.2f}{waited}"


def main() -> int:
    kept: dict[str, Any] = {}
    out = Path(os.environ.get("GPU_OUT", "."), "steps.json")
    settings = [(1, "nccl" if HAS_GPU else "gloo"), (2, "gloo")]
    missed = False
    for ranks, backend in settings:
        with tempfile.TemporaryDirectory(prefix="photinus-gpu-") as folder:
            environ = {"STORE_OF_TEST": f"{folder}/store", "BACKEND_OF_TEST": backend, "PHOTINUS_RANKS_PER_GPU": "2"}
            with RankPool("benchmarks.gpu_steps:Steps", world_size=ranks, timeout_s=120, environ=environ) as pool:
                for model in MODELS:
                    check, began = f"{model}, {ranks} rank{'s' * (ranks > 1)}, {backend}", time.monotonic()
                    if pool.is_broken:
                        tell(check, "skip", reason="the ranks ended in an earlier measurement")
                        continue
                    try:
                        figures = kept[check] = measure(pool, model, ROUNDS[ranks])
                    except RankError as error:
                        missed = True
                        tell(check, "miss", reason=str(error)[-800:])
                        continue
                    out.write_text(json.dumps(kept, indent=1))
                    words = "; ".join(_words(name, each) for name, each in figures.items())
                    worst = max(each["to_torch"] for name, each in figures.items() if name.startswith("ours"))
                    slower = worst > 1 + SLOWER and not FAKE
                    missed |= slower
                    tell(check, "miss" if slower else "pass", figure=words, seconds=time.monotonic() - began)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
