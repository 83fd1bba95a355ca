"""Trainings in which one rank, or all, do something in a way of their own; what each rank says in the end.

A module of tests has a function `train(way, strategy, rank, folder)`, which returns weights. The way "nothing" is the
training without misbehaviour. Cases share their processes; each has a process group of its own.
"""

from __future__ import annotations

import contextlib
import importlib
from datetime import timedelta
from pathlib import Path

from tests.ranks import run_ranks, values

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def outcomes(
    module: str, folder: Path, ways: list[str], strategies: tuple[str, ...], world_size: int = 2
) -> dict[tuple[str, str], list[str]]:
    """Return what each rank says, by way and strategy: "right", "wrong weights", or its error."""
    arguments = {"module": module, "folder": str(folder), "ways": ways, "strategies": strategies}
    found = values(run_ranks(f"{__name__}:cases", world_size=world_size, timeout_s=400, arguments=arguments))
    return {(way, s): [rank[f"{way}, {s}"] for rank in found] for s in strategies for way in ways}


def cases(
    rank: int, world_size: int, module: str, folder: str, ways: list[str], strategies: list[str]
) -> dict[str, str]:
    import torch
    import torch.distributed as dist

    import photinus

    train = importlib.import_module(module).train
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    for strategy in strategies:
        for number, way in enumerate(["nothing", *ways]):
            case = f"{way}, {strategy}"
            print(case, flush=True)
            out = Path(folder, f"{strategy}-{number}")
            out.mkdir(parents=True, exist_ok=True)
            store = dist.FileStore(str(out / "store"), world_size)
            dist.init_process_group(
                "photinus", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=5)
            )
            try:
                with photinus.init(device="cpu", seed=1):
                    weights = train(way, strategy, rank, out)
                if way == "nothing":
                    right = weights
                found[case] = "right" if weights == right else "wrong weights"
            except Exception as error:  # noqa: BLE001 - it is what is looked at
                found[case] = f"error: {type(error).__name__}: {error}"
            with contextlib.suppress(photinus.errors.CollectiveError):  # of further calls of the same failure
                dist.destroy_process_group()
    return found
