"""How much of the exchange of gradients hides behind backward on a GPU that two ranks share, over photinus and gloo.

    python benchmarks/gpu_overlap.py      a stage of `make gpu`; writes overlap.json into the folder GPU_OUT

Whole training steps, as in gpu_steps.py, of both DDPs and of FSDP2 over both backends, beside the steps without any
exchange and the reduction of as many bytes by itself. What of the reduction is exposed is a step less one without
exchange, divided by the reduction. Also: seconds in which the thread that trains is blocked in wait(), and how long the
GPU's stream waited for averages when backward was over. With GPU_FAKE set: a small model on CPU tensors, and no bars.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests.rank_pool starts the ranks

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import photinus
from benchmarks.gpu_results import tell
from benchmarks.gpu_steps import Steps, step_of
from benchmarks.ranks import models
from photinus.waiting_time import waiting_time
from tests.gpu.device import DEVICE, FAKE, HAS_GPU, settle
from tests.rank_pool import RankPool

MODEL = "gpt-10m:1x16" if FAKE else "gpt-2-small:96x128"
ROUNDS, TURN_S = (1, 0.05) if FAKE else (5, 0.5)
OURS, THEIRS, ALONE, REDUCTION = "ours over photinus", "torch over gloo", "no exchange", "the reduction"
EXPOSED, FASTER, LONG_ENOUGH, WORTH_A_WORD = 0.3, 1.3, 1.5, 0.03
_BUCKET_BYTES = 25 << 20


class Overlap(Steps):
    """A rank: both backends have a group in it."""

    def prepare(self, model: str) -> list[str]:
        """Makes all contestants."""
        groups = {"photinus": dist.new_group(backend="photinus"), "gloo": dist.group.WORLD}
        for name in (ALONE, OURS, THEIRS, "torch over photinus", "FSDP2 over photinus", "FSDP2 over gloo"):
            net, inputs = models.make(model)
            net, inputs = net.to(DEVICE), tuple(each.to(DEVICE) for each in inputs)
            kind, _, backend = name.partition(" over ")
            wrapped: Any = net
            if kind == "FSDP2":
                mesh = DeviceMesh.from_group(groups[backend], DEVICE.type)
                for part in (*getattr(net, "blocks", ()), net):
                    fully_shard(part, mesh=mesh)
            elif kind == "torch":
                wrapped = nn.parallel.DistributedDataParallel(net, process_group=groups[backend])
            elif kind == "ours":
                wrapped = photinus.DistributedDataParallel(net, process_group=groups[backend])
            self.wrapped[name] = wrapped
            self.steps[name] = step_of(wrapped, torch.optim.SGD(wrapped.parameters(), lr=1e-6), inputs)
        elems = sum(each.numel() for each in self.wrapped[ALONE].parameters())
        buckets = torch.zeros(elems, device=DEVICE).split(_BUCKET_BYTES // 4)

        def reduce() -> None:
            for work in [dist.all_reduce(each, group=groups["photinus"], async_op=True) for each in buckets]:
                work.wait()

        self.steps[REDUCTION] = reduce
        for step in self.steps.values():
            for _ in range(3):
                step()
        settle()
        self.inputs = inputs
        return list(self.steps)

    def turn(self, name: str, count: int) -> dict[str, float]:
        """As in Steps; with the seconds of a step in which this thread was blocked in wait()."""
        waiting_time.start()
        before = waiting_time.total_ns
        try:
            told = super().turn(name, count)
        finally:
            waiting_time.stop()
        return {**told, "blocked_s": (waiting_time.total_ns - before) / 1e9 / count}

    def backward(self) -> float:
        """Seconds of a backward without exchange, while the other rank does the same."""
        taken = []
        for _ in range(5):
            loss = self.wrapped[ALONE](*self.inputs)
            settle()
            dist.barrier()
            began = time.perf_counter()
            loss.backward()
            settle()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)


def measure(pool: RankPool) -> tuple[dict[str, dict[str, float]], float, float | None]:
    """Medians of all contestants; seconds of a backward; and what the stream waited for averages behind ours."""
    names = pool.ask({"do": "prepare", "model": MODEL})[0]

    def turn(name: str, count: int) -> dict[str, float]:
        told = pool.ask({"do": "turn", "name": name, "count": count})
        return {key: max(each[key] for each in told) for key in told[0]}

    counts = {name: max(2, int(TURN_S / turn(name, 2)["step_s"])) for name in names}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(ROUNDS):
        for name in names if number % 2 else reversed(names):
            turns[name].append(turn(name, counts[name]))
    figures = {n: {key: statistics.median(t[key] for t in taken) for key in taken[0]} for n, taken in turns.items()}
    waited = max((each for each in pool.ask({"do": "waited", "name": OURS}) if each is not None), default=None)
    return figures, max(pool.ask({"do": "backward"})), waited


def main() -> int:
    """Measures; 1 when a bar is missed."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="photinus-gpu-") as folder:
        environ = {"STORE_OF_TEST": f"{folder}/store", "BACKEND_OF_TEST": "gloo", "PHOTINUS_RANKS_PER_GPU": "2"}
        with RankPool("benchmarks.gpu_overlap:Overlap", world_size=2, timeout_s=120, environ=environ) as pool:
            figures, backward_s, waited_s = measure(pool)
    out = Path(os.environ.get("GPU_OUT", "."), "overlap.json")
    out.write_text(json.dumps({"figures": figures, "backward_s": backward_s, "waited_s": waited_s}, indent=1))
    step = {name: each["step_s"] for name, each in figures.items()}
    exposed = max(0.0, step[OURS] - step[ALONE]) / step[REDUCTION]
    ratio = backward_s / step[REDUCTION]
    words = f"{exposed:.0%} of {step[REDUCTION] * 1e3:.1f} ms is exposed; backward is {ratio:.2f} x the reduction"
    shows = ratio >= LONG_ENOUGH or FAKE
    outcome = ("pass" if exposed <= EXPOSED or FAKE else "miss") if shows else "skip"
    reason = "" if shows else f"{words}: it shows from {LONG_ENOUGH} x on"
    tell(f"{MODEL}: exposed", outcome, figure=words if shows else "", reason=reason)
    faster = step[THEIRS] / step[OURS]
    faster_enough = faster >= FASTER or FAKE
    words = "; ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in step.items())
    words = f"a step of ours over photinus is {faster:.2f} x as fast as torch's over gloo: {words}"
    tell(f"{MODEL}: steps", "pass" if faster_enough else "miss", figure=words, seconds=time.monotonic() - began)
    blocked = figures[OURS]["blocked_s"] / step[OURS]
    words = f"blocked in wait() {figures[OURS]['blocked_s'] * 1e3:.2f} ms of a step ({blocked:.1%})"
    words += f", FSDP2's {figures['FSDP2 over photinus']['blocked_s'] * 1e3:.2f} ms"
    words += "" if waited_s is None else f"; the stream waited for averages {waited_s * 1e3:.2f} ms"
    words += ": worth a word" if blocked > WORTH_A_WORD else ""
    tell(f"{MODEL}: waiting", "pass", figure=words)
    is_well = (outcome != "miss" and faster_enough) or not HAS_GPU
    return int(not is_well)


if __name__ == "__main__":
    sys.exit(main())
