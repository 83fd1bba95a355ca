"""all_reduce of tensors on a GPU through the host's memory: photinus, gloo, and what the copies alone take.

    python benchmarks/gpu_collectives.py      a stage of `make gpu`; writes collectives.json into the folder GPU_OUT

Ranks share the GPU, and so its link. All contestants are in the same processes and take turns; figures are medians:

    photinus, gloo        torch.distributed.all_reduce in place, of one tensor or of several begun at once
    copies                the floor: every rank copies its tensor to the host and back, all at once; nothing is added
    copy in host memory   every rank copies as much there, which tells the rate of host memory
    added on the GPU      a prototype whose additions the GPU does, to see how much that would pay

The ceiling is the floor, or the rate of host memory divided by 3 G + 1 where that is less (docs/how-to/gpus.md). With
GPU_FAKE set, sizes are small and no bar holds: every line runs, nothing is learned.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests.rank_pool starts the ranks

from benchmarks.gpu_results import tell
from benchmarks.ranks.gpu_rank import COPIES, GPU_ADDS, HOST_COPY
from photinus.tools.bench import size_name
from tests.fake_cuda import library
from tests.gpu.device import FAKE
from tests.rank_pool import RankError, RankPool

KIB, MIB = 1 << 10, 1 << 20
ROUNDS, TURN_S = (1, 0.01) if FAKE else (5, 0.12)
LARGE_BYTES = 64 * MIB
OF_CEILING = {2: 0.8, 3: 0.7, 4: 0.7}
OF_ONE = 0.85
MODEL = 0.2


@dataclass(frozen=True)
class Case:
    """What is reduced: bytes of each rank, as so many tensors."""

    ranks: int
    size_bytes: int
    dtype: str = "float32"
    pieces: int = 1
    contestants: tuple[str, ...] = ("photinus", "gloo", COPIES, HOST_COPY)

    def __str__(self) -> str:
        parts = f"{self.pieces} x " if self.pieces > 1 else ""
        return f"{self.ranks} ranks, {self.dtype}, {parts}{size_name(self.size_bytes // self.pieces)}"


def cases() -> list[Case]:
    """The most telling first, for time may run out."""
    everybody = ("photinus", "gloo", COPIES, HOST_COPY, GPU_ADDS)
    ours = ("photinus", COPIES, HOST_COPY)
    if FAKE:
        return [Case(2, 20 * MIB, contestants=everybody), Case(2, 36 * KIB, pieces=3), Case(3, 12 * KIB, "bfloat16")]
    return [
        Case(2, LARGE_BYTES, contestants=everybody),
        Case(4, LARGE_BYTES, contestants=everybody),
        Case(2, 184 * MIB, contestants=ours),
        Case(2, 184 * MIB, pieces=46, contestants=ours),
        *(Case(2, size) for size in (4 * KIB, 64 * KIB, MIB, 16 * MIB)),
        Case(2, LARGE_BYTES, "bfloat16"),
        Case(4, LARGE_BYTES, "bfloat16"),
        *(Case(4, size) for size in (64 * KIB, MIB)),
        Case(3, LARGE_BYTES),
        Case(8, LARGE_BYTES, contestants=ours),
    ]


def measure(pool: RankPool, case: Case) -> dict[str, dict[str, float]]:
    """Medians of each contestant, from turns that alternate: seconds of a call, and of a rank's processors in it."""
    shape = {"size_bytes": case.size_bytes, "dtype": case.dtype, "pieces": case.pieces}
    pool.ask({"do": "prepare", "names": case.contestants, **shape})

    def turn(name: str, count: int) -> dict[str, float]:
        told = pool.ask({"do": "turn", "name": name, "count": count})
        return {"s": max(each["s"] for each in told), "cpu_s": statistics.mean(each["cpu_s"] for each in told)}

    counts = {name: max(1, min(2000, int(TURN_S / turn(name, 2)["s"]))) for name in case.contestants}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in case.contestants}
    for number in range(ROUNDS):
        for name in case.contestants if number % 2 else reversed(case.contestants):
            turns[name].append(turn(name, counts[name]))
    return {
        name: {key: statistics.median(each[key] for each in taken) for key in ("s", "cpu_s")}
        for name, taken in turns.items()
    }


def ceiling_of(case: Case, figures: dict[str, dict[str, float]]) -> tuple[float, str]:
    """Return the rate that copies or host memory allow, and which of them binds (see docs/how-to/gpus.md)."""
    memory = 2 * case.ranks * case.size_bytes / figures[HOST_COPY]["s"]
    link = case.size_bytes / figures[COPIES]["s"]
    return min((link, "PCIe"), (memory / (3 * case.ranks + 1), "host memory"))


def judge(case: Case, figures: dict[str, dict[str, float]], one: float | None) -> tuple[list[str], list[str]]:
    """What was found, and of it what misses a bar. `one`: seconds of the same bytes as one tensor."""
    rate = {name: case.size_bytes / each["s"] for name, each in figures.items()}
    cpu = figures["photinus"]["cpu_s"] / case.size_bytes * 1e9
    ceiling, binds = ceiling_of(case, figures)
    share = rate["photinus"] / ceiling
    words = [f"{name} {each / 1e9:.2f} GB/s" for name, each in rate.items()]
    words += [f"{cpu:.2f} s of a rank's processors per GB", f"{share:.0%} of the ceiling ({binds} binds)"]
    missed = []
    if case.size_bytes >= LARGE_BYTES and share < OF_CEILING.get(case.ranks, 0.0):
        missed.append(f"{OF_CEILING[case.ranks]:.0%} of the ceiling wanted")
    if case.size_bytes >= LARGE_BYTES and case.pieces == 1 and abs(share - 1) > MODEL:
        words.append("the model is not within 20 %")
    if "gloo" in rate:
        times, wanted = rate["photinus"] / rate["gloo"], 4 if case.size_bytes >= MIB else 2
        words.append(f"{times:.1f} x gloo")
        missed += [f"{wanted} x gloo wanted"] if times < wanted else []
    if one is not None:
        words.append(f"{one / figures['photinus']['s']:.0%} of the speed of one tensor")
        missed += [f"{OF_ONE:.0%} of one tensor wanted"] if one / figures["photinus"]["s"] < OF_ONE else []
    if GPU_ADDS in rate:
        words.append(f"adding on the GPU would be {rate[GPU_ADDS] / rate['photinus']:.2f} x as fast")
    return words, [] if FAKE else missed


def main() -> int:
    """Measures all cases; 1 when one misses a bar or fails."""
    kept: dict[str, Any] = {}
    out = Path(os.environ.get("GPU_OUT", "."), "collectives.json")
    pools: dict[int, RankPool] = {}
    whole: dict[tuple[int, int, str], float] = {}  # of one tensor
    failed = False
    if FAKE:
        library()  # once, not by each rank
    with tempfile.TemporaryDirectory(prefix="photinus-gpu-") as folder:
        try:
            for case in cases():
                began = time.monotonic()
                if case.ranks not in pools:
                    environ = {"STORE_OF_TEST": f"{folder}/store{case.ranks}"}
                    rank = "benchmarks.ranks.gpu_rank:Reductions"
                    pools[case.ranks] = RankPool(rank, world_size=case.ranks, timeout_s=60, environ=environ)
                pool = pools[case.ranks]
                if pool.is_broken:
                    tell(str(case), "skip", reason="the ranks ended in an earlier measurement")
                    continue
                try:
                    figures = measure(pool, case)
                except RankError as error:
                    failed = True
                    tell(str(case), "miss", reason=str(error)[-800:])
                    continue
                key = (case.ranks, case.size_bytes, case.dtype)
                words, missed = judge(case, figures, whole.get(key) if case.pieces > 1 else None)
                if case.pieces == 1:
                    whole[key] = figures["photinus"]["s"]
                kept[str(case)] = figures
                out.write_text(json.dumps(kept, indent=1))
                failed |= bool(missed)
                seconds = time.monotonic() - began
                tell(str(case), "miss" if missed else "pass", figure="; ".join([*missed, *words]), seconds=seconds)
        finally:
            for pool in pools.values():
                pool.__exit__(None, None, None)
    tell("nccl", "skip", reason="it takes a GPU for each rank: `photinus bench --device cuda` measures it there")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
