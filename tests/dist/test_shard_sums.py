"""Sums over logical shards against a plain definition of the tree, for many numbers of ranks and shards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import photinus
from photinus.parallel.exchange.shard_tree import own_shards
from tests.ranks import run_ranks

_MOST_SHARDS = 16


def naive(leaves: list[Tensor]) -> Tensor:
    """The sum of the largest power of two below their number, plus the sum of the rest."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1
    while 2 * half < len(leaves):
        half *= 2
    return naive(leaves[:half]) + naive(leaves[half:])


def gradients(shard: int, shards: int, dtype: torch.dtype) -> list[Tensor | None]:
    """Of four parameters, with values of many magnitudes; the last has none in every third shard."""
    generator = torch.Generator().manual_seed(100 * shards + shard)
    found: list[Tensor | None] = []
    for size in (5, 1, 33, 700):
        values = torch.randn(size, generator=generator) * torch.randn(size, generator=generator).mul(4).exp()
        values[0] = -0.0
        found.append(values.to(dtype))
    return [*found[:3], None if shard % 3 == 1 else found[3]]


class Leaves(nn.Module):
    """Gradients are what `forward` is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (5, 1, 33, 700)])

    def forward(self, of_shard: list[Tensor | None]) -> Tensor:
        pairs = zip(self.weights, of_shard, strict=True)
        return torch.stack([(weight * values).sum() for weight, values in pairs if values is not None]).sum()


def compare(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for cap_mb in (25, 1e-4):
            for shards in range(world_size, _MOST_SHARDS + 1):
                model = photinus.DistributedDataParallel(
                    Leaves(dtype), find_unused_parameters=True, bucket_cap_mb=cap_mb
                )
                model.add_in_shards(shards)
                assert model.shard_sums is not None
                for _ in range(2):  # the first step rebuilds the buckets
                    _step(model, own_shards(rank, world_size, shards), shards, dtype)
                model.reducer.stop()


def _step(model: photinus.DistributedDataParallel, own: range, shards: int, dtype: torch.dtype) -> None:
    sums = model.shard_sums
    assert sums is not None
    model.zero_grad()
    sums.begin_step()
    for shard in own[:-1]:
        with model.no_sync():
            model(gradients(shard, shards, dtype)).backward()
        sums.put_aside(shard, model.reducer.slots)
    sums.await_last()
    model(gradients(own[-1], shards, dtype)).backward()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for place, weight in enumerate(model.module.weights):  # type: ignore[union-attr, arg-type]
        found = [gradients(shard, shards, dtype)[place] for shard in range(shards)]
        leaves = [torch.zeros_like(weight, dtype=wide) if each is None else each.to(wide) for each in found]
        expected = (naive(leaves) / shards).to(dtype)
        assert isinstance(weight.grad, Tensor)
        bits = weight.grad.view(torch.uint8), expected.view(torch.uint8)
        assert torch.equal(*bits), (shards, dtype, place, weight.grad, expected)


@pytest.mark.parametrize(
    ("ranks", "backend", "hosts"),
    [
        (1, "photinus", None),
        (2, "photinus", None),
        (3, "photinus", "aab"),
        (4, "photinus", "aabb"),
        (5, "gloo", None),
        pytest.param(5, "photinus", "abbbb", marks=pytest.mark.slow),
        pytest.param(7, "photinus", None, marks=pytest.mark.slow),
        pytest.param(8, "photinus", "aaaabbbb", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_shards_add_up_as_one_tree_says(ranks: int, backend: str, hosts: str | None) -> None:
    run_ranks("tests.dist.test_shard_sums:compare", world_size=ranks, backend=backend, hosts=hosts, timeout_s=200)
