"""How large the buckets of DistributedDataParallel are, where nobody says so."""

from __future__ import annotations

import pytest

from photinus.parallel.reducer.buckets import DEFAULT_BUCKET_CAP_BYTES, default_cap_bytes
from tests.ranks import run_ranks, values


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_caps_follow_from_the_rate_between_hosts_and_are_equal_on_all_ranks(hosts: str | None) -> None:
    results = run_ranks(f"{__name__}:_caps", world_size=2, backend="photinus", timeout_s=60, hosts=hosts)
    (bytes_per_s, given, chosen), *others = values(results)
    assert others == [[bytes_per_s, given, chosen]]
    assert (bytes_per_s > 0) == (hosts is not None)
    assert chosen == default_cap_bytes(bytes_per_s)
    assert given == DEFAULT_BUCKET_CAP_BYTES


def _caps(rank: int, world_size: int) -> tuple[float, int, int]:
    from torch import nn

    from photinus import DistributedDataParallel
    from photinus.parallel.exchange.collectives import rate_between_hosts

    ddp, with_cap = DistributedDataParallel(nn.Linear(2, 2)), DistributedDataParallel(nn.Linear(2, 2), bucket_cap_mb=25)
    return rate_between_hosts(ddp.process_group, ddp.device), with_cap.bucket_bytes_cap, ddp.bucket_bytes_cap
