"""Which samples a rank takes in which step."""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from photinus.trainer.data.sampler import GlobalBatches, LocalBatch, ShardedOnce


def ranks(samples: int, batch_size: int, world_size: int, **options: object) -> list[GlobalBatches]:
    return [
        GlobalBatches(samples, batch_size, rank=rank, world_size=world_size, **options)  # type: ignore[arg-type]
        for rank in range(world_size)
    ]


def global_batch(shares: list[GlobalBatches], epoch: int, index: int) -> list[int]:
    """Put the ranks' samples together: the first of each, then the second of each."""
    parts = [part.indices for part in (share.batch(epoch, index) for share in shares) if part.samples]
    return [part[place] for place in range(len(parts[0])) for part in parts if place < len(part)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7, 12])
def test_the_global_batches_do_not_depend_on_the_world_size(world_size: int) -> None:
    alone, shares = ranks(100, 12, 1, seed=5), ranks(100, 12, world_size, seed=5)
    for epoch in (0, 1, 7):
        for index in range(len(alone[0])):
            assert global_batch(shares, epoch, index) == alone[0].batch(epoch, index).indices


@settings(max_examples=200, deadline=None)
@given(
    samples=st.integers(1, 300),
    batch_size=st.integers(1, 200),
    world_size=st.integers(1, 7),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 10**6),
)
def test_each_epoch_has_each_sample_once_but_for_a_dropped_rest(
    samples: int, batch_size: int, world_size: int, shuffle: bool, drop_last: bool, seed: int, epoch: int
) -> None:
    rest = samples % batch_size
    try:
        shares = ranks(samples, batch_size, world_size, shuffle=shuffle, drop_last=drop_last, seed=seed)
    except ValueError:
        assert batch_size < world_size or (drop_last and batch_size > samples)
        return
    assert len({len(s) for s in shares}) == 1
    seen: Counter[int] = Counter()
    for index in range(len(shares[0])):
        parts = [s.batch(epoch, index) for s in shares]
        sizes = [part.samples for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert min(len(part.indices) for part in parts) >= 1
        assert {part.global_samples for part in parts} == {sum(sizes)}
        # Rank r's local mean times its weight, averaged over the ranks, is the mean over the global batch.
        local_means = [sum(part.indices) / len(part.indices) for part in parts]
        averaged = sum(mean * part.weight for mean, part in zip(local_means, parts, strict=True)) / world_size
        assert averaged == pytest.approx(sum(sum(part.indices) for part in parts if part.samples) / sum(sizes))
        seen.update(sample for part in parts if part.samples for sample in part.indices)
    assert set(seen.values()) == {1}
    assert len(seen) == samples - (rest if drop_last else 0)


def test_epochs_and_seeds_have_different_orders_and_repeat_exactly() -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(GlobalBatches(50, 50, seed=seed).batch(epoch, 0).indices)

    orders = {order(seed, epoch) for seed in (0, 100, 200, 300) for epoch in range(4)}
    assert len(orders) == 16
    assert order(2, 3) == order(2, 3)


def test_going_back_to_an_earlier_epoch_gives_its_order_again() -> None:
    batches = GlobalBatches(20, 5, seed=1)
    first = [batches.batch(0, index) for index in range(4)]
    batches.batch(1, 0)
    assert [batches.batch(0, index) for index in range(4)] == first


def test_orders_are_those_of_earlier_versions() -> None:
    """A run must go on with the same samples after an upgrade. If this fails, torch.randperm has changed: resumed
    runs would see other samples than before, so the algorithm has to be kept by other means."""
    assert GlobalBatches(10, 10, seed=0).batch(0, 0).indices == [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]
    assert GlobalBatches(10, 10, seed=0).batch(1, 0).indices == [5, 6, 1, 2, 0, 8, 9, 3, 7, 4]
    assert GlobalBatches(10, 10, seed=1).batch(0, 0).indices == [5, 6, 1, 2, 0, 8, 9, 3, 7, 4]
    large = GlobalBatches(100_000, 100_000, seed=3).batch(5, 0).indices
    assert zlib.crc32(struct.pack(f"<{len(large)}q", *large)) == 2602051424


def test_the_global_generator_and_default_device_are_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.device("meta"):
        indices = GlobalBatches(10, 10, seed=0).batch(0, 0).indices
    assert sorted(indices) == list(range(10))
    assert torch.equal(torch.get_rng_state(), before)


def test_shuffling_is_even() -> None:
    """Each sample comes first about equally often: chi-squared over 20 samples and 4000 epochs, 19 degrees."""
    first = Counter(GlobalBatches(20, 1, seed=9).batch(epoch, 0).indices[0] for epoch in range(4000))
    chi_squared = sum((first[sample] - 200) ** 2 / 200 for sample in range(20))
    assert chi_squared < 50  # beyond 43.8 once in 1000 seeds; this seed is fixed


def test_without_shuffling_the_order_is_the_datasets() -> None:
    shares = ranks(10, 4, 2, shuffle=False, drop_last=False)
    assert [share.batch(3, index).indices for index in range(3) for share in shares] == [
        [0, 2], [1, 3], [4, 6], [5, 7], [8], [9],
    ]  # fmt: skip


def test_an_uneven_last_batch_is_weighted() -> None:
    shares = ranks(11, 8, 2, shuffle=False, drop_last=False)
    assert shares[0].batch(0, 1) == LocalBatch([8, 10], weight=4 / 3, global_samples=3, samples=2)
    assert shares[1].batch(0, 1) == LocalBatch([9], weight=2 / 3, global_samples=3, samples=1)


def test_a_rank_for_which_a_short_batch_has_no_sample_takes_part_without_weight() -> None:
    shares = ranks(6, 4, 3, shuffle=False)
    assert [share.batch(0, 1).indices for share in shares] == [[4], [5], [4, 5]]
    assert [share.batch(0, 1).weight for share in shares] == [1.5, 1.5, 0.0]
    assert [share.batch(0, 1).samples for share in shares] == [1, 1, 0]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_each_rank_has_the_batches_of_torchs_distributed_sampler(world_size: int, shuffle: bool) -> None:
    samples, own_size = 60, 5
    shares = ranks(samples, own_size * world_size, world_size, seed=7, shuffle=shuffle)
    for rank, share in enumerate(shares):
        sampler = DistributedSampler(
            range(samples),
            num_replicas=world_size,
            rank=rank,
            seed=7,
            shuffle=shuffle,  # type: ignore[arg-type]
        )
        for epoch in (0, 1, 5):
            sampler.set_epoch(epoch)
            theirs = [batch.tolist() for batch in DataLoader(range(samples), own_size, sampler=sampler)]  # type: ignore[arg-type]
            assert [share.batch(epoch, index).indices for index in range(len(share))] == theirs


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batch_size": 2, "world_size": 3}, "batch_size=2 is fewer .*world_size=3 ranks.*at most 2 of them"),
        (
            {"batch_size": 128, "samples": 100, "world_size": 8, "drop_last": True},
            "more than the 100 samples.*at most 100, or drop_last=False",
        ),
        ({"samples": 0}, "empty"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_with_what_would_fit(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GlobalBatches(**{"samples": 100, "batch_size": 4, **arguments})


@settings(max_examples=200, deadline=None)
@given(samples=st.integers(0, 200), world_size=st.integers(1, 9), batch_size=st.integers(1, 64))
def test_validation_takes_each_sample_exactly_once(samples: int, world_size: int, batch_size: int) -> None:
    shares = [ShardedOnce(samples, batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [sample for share in shares for sample in share.indices] == list(range(samples))
    sizes = [len(share.indices) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    for share, count in zip(shares, counts, strict=True):
        batches = [share.batch(0, index) for index in range(count)]
        assert [sample for batch in batches for sample in batch.indices] == list(share.indices)
    for step in range(max(counts)):  # the samples of one step over all ranks, as each rank counts them
        parts = [share.batch(0, step) for share, count in zip(shares, counts, strict=True) if step < count]
        assert {part.global_samples for part in parts} == {sum(len(part.indices) for part in parts)}
        assert sum(part.weight for part in parts) == pytest.approx(world_size)


def test_validation_with_fewer_samples_than_ranks_leaves_some_ranks_without() -> None:
    assert [list(ShardedOnce(2, 8, rank=rank, world_size=4).indices) for rank in range(4)] == [[0], [1], [], []]
    assert len(ShardedOnce(2, 8, rank=3, world_size=4)) == 0
