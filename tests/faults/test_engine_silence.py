"""Ranks of other hosts of whom nothing is heard, and that live."""

from __future__ import annotations

import time
from typing import Any

from tests.ranks import run_ranks, values


def test_a_rank_is_not_taken_for_silent_when_the_one_that_told_of_it_has_left() -> None:
    results = run_ranks(
        f"{__name__}:_outlives_its_host_mate",
        world_size=4,
        hosts="aabb",
        backend="photinus",
        environ={"PHOTINUS_GRACE_S": "1.5"},
    )
    assert values(results)[0] == 7.0
    assert all("suspects" not in result.output for result in results)


def _outlives_its_host_mate(rank: int, world_size: int) -> float:
    import torch
    import torch.distributed as dist

    tensor: Any = torch.full((1,), 7.0 if rank == 3 else 0.0)
    dist.barrier()
    time.sleep(1)  # signs of life come; then rank 2 leaves, the only one of its host that rank 0 has a link with
    if rank == 3:
        time.sleep(4.5)
        dist.send(tensor, 0)
    elif rank == 0:
        dist.recv(tensor, 3)
    return float(tensor.item())
