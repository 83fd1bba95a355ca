"""How large the buckets of DistributedDataParallel are, where nobody says so."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks, values

MIB = 1 << 20


@pytest.mark.parametrize(("hosts", "chosen"), [(None, 25 * MIB), ("ab", 3_600_000)])
def test_caps_follow_from_the_rate_between_hosts(hosts: str | None, chosen: int) -> None:
    results = run_ranks(f"{__name__}:_caps", world_size=2, backend="photinus", timeout_s=60, hosts=hosts)
    assert values(results) == [{"default": chosen, "given": 20 * MIB}] * 2


def _caps(rank: int, world_size: int) -> dict[str, int]:
    """Over hosts, as if 120 MB/s had been measured: what is, depends on the machine."""
    import torch.distributed as dist
    from torch import nn

    from photinus import DistributedDataParallel, engine

    group = dist.group.WORLD
    assert group is not None
    if group.communicator.about_hosts:  # type: ignore[attr-defined]
        engine.Communicator.speeds = property(lambda _: (50e-6, 120e6))  # type: ignore[assignment, method-assign]
    default, given = (DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=cap) for cap in (None, 20))
    return {"default": default.bucket_bytes_cap, "given": given.bucket_bytes_cap}
