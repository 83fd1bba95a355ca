"""The assignment of parameters to buckets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from photinus.parallel.reducer.buckets import (
    ALIGNMENT_BYTES,
    DEFAULT_BUCKET_CAP_BYTES,
    FIRST_BUCKET_BYTES,
    BucketPlan,
    assign_buckets,
    default_cap_bytes,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex128]


def specs(*elems: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.empty(n, dtype=dtype, device="meta") for n in elems]


def test_parameters_lie_in_reverse_registration_order() -> None:
    (bucket,) = assign_buckets(specs(16, 16, 16), cap_bytes=1 << 20)
    assert bucket == BucketPlan(torch.float32, (2, 1, 0), (0, 16, 32), 48)


def test_first_bucket_is_small_and_the_others_are_not() -> None:
    buckets = assign_buckets(specs(*[16] * 9), cap_bytes=256, first_cap_bytes=64)
    assert [b.parameters for b in buckets] == [(8,), (7, 6, 5, 4), (3, 2, 1, 0)]


def test_first_cap_above_the_cap_does_not_enlarge_the_first_bucket() -> None:
    buckets = assign_buckets(specs(*[16] * 4), cap_bytes=64, first_cap_bytes=1 << 20)
    assert [b.parameters for b in buckets] == [(3,), (2,), (1,), (0,)]


def test_a_parameter_above_the_cap_has_a_bucket_for_itself() -> None:
    buckets = assign_buckets(specs(16, 1000, 16), cap_bytes=128, first_cap_bytes=128)
    assert [b.parameters for b in buckets] == [(2,), (1,), (0,)]


def test_a_bucket_holds_one_dtype_and_buckets_are_sorted_by_the_parameter_that_completes_them() -> None:
    mixed = [torch.empty(16, dtype=torch.float64 if i % 3 == 0 else torch.float32) for i in range(6)]
    buckets = assign_buckets(mixed, cap_bytes=1 << 20)
    assert [(b.dtype, b.parameters) for b in buckets] == [(torch.float32, (5, 4, 2, 1)), (torch.float64, (3, 0))]


def test_another_order_can_be_given() -> None:
    (bucket,) = assign_buckets(specs(16, 16, 16), cap_bytes=1 << 20, order=[1, 0, 2])
    assert bucket.parameters == (1, 0, 2)
    with pytest.raises(ValueError, match="each of the 3 parameters once"):
        assign_buckets(specs(16, 16, 16), cap_bytes=1 << 20, order=[1, 0, 1])


def test_a_cap_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        assign_buckets(specs(1), cap_bytes=0)


def test_no_parameters_make_no_buckets() -> None:
    assert assign_buckets([], cap_bytes=100) == []


@settings(max_examples=200, deadline=None)
@given(
    parameters=st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(DTYPES)), max_size=40),
    cap=st.integers(1, 40_000),
    first=st.integers(1, 40_000),
)
def test_every_parameter_lies_once_aligned_without_overlap_and_within_the_cap(
    parameters: list[tuple[int, torch.dtype]], cap: int, first: int
) -> None:
    tensors = [torch.empty(n, dtype=dtype, device="meta") for n, dtype in parameters]
    buckets = assign_buckets(tensors, cap_bytes=cap, first_cap_bytes=first)
    assert sorted(i for b in buckets for i in b.parameters) == list(range(len(parameters)))
    for bucket in buckets:
        end = 0
        for index, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            assert tensors[index].dtype == bucket.dtype
            assert offset * bucket.dtype.itemsize % ALIGNMENT_BYTES == 0
            assert offset >= end
            end = offset + tensors[index].numel()
        assert end <= bucket.elems
        assert bucket.bytes <= cap or len([i for i in bucket.parameters if tensors[i].numel()]) == 1
    completing = [min(b.parameters) for b in buckets]  # walked backwards, so the smallest index comes last
    assert completing == sorted(completing, reverse=True)


def test_slow_hosts_have_smaller_buckets_by_default() -> None:
    assert default_cap_bytes(0.0) == DEFAULT_BUCKET_CAP_BYTES
    assert default_cap_bytes(1.2e9) == DEFAULT_BUCKET_CAP_BYTES
    assert default_cap_bytes(120e6) == 3_600_000
    assert default_cap_bytes(12e6) == FIRST_BUCKET_BYTES
