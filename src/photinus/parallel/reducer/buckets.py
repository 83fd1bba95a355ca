"""The assignment of parameters to buckets, as a pure function.

Gradients that are reduced together lie in one flat bucket, so that a model of thousands of small parameters costs
dozens of collectives. The assignment is plain data, equal on all ranks because it depends on nothing but the
parameters' order, sizes and dtypes; `photinus.parallel.reducer.reducer` gives it memory.

The result of a reduction does not depend on the layout: every element is averaged over the ranks by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

DEFAULT_BUCKET_CAP_BYTES = 25 * 1024 * 1024
"""Cap of a bucket: large enough that bandwidth counts and not latency, small enough to overlap with backward."""

FIRST_BUCKET_BYTES = 1024 * 1024
"""Cap of the first bucket of each dtype: small, so that the exchange begins as soon as backward has begun."""

DEFAULT_BUCKET_S = 0.03
"""What a bucket may take from host to host: a slow card that waits for 25 MiB is idle meanwhile, and busy with them for
long after backward has ended. At 1 Gbit/s, steps whose exchange is as long as backward take 0.92 of the time."""

ALIGNMENT_BYTES = 64
"""Every gradient begins on a cache line: vector instructions and ranks that share memory do not meet inside one."""


@dataclass(frozen=True)
class BucketPlan:
    """One bucket.

    Attributes:
        dtype: of all its parameters.
        parameters: indices into the sequence that `assign_buckets` was given, in the order in which they lie.
        offsets: where each begins, in elements; a multiple of ALIGNMENT_BYTES.
        elems: length of the bucket, padding included.
    """

    dtype: torch.dtype
    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    elems: int

    @property
    def bytes(self) -> int:
        """Length of the bucket in bytes."""
        return self.elems * self.dtype.itemsize


@dataclass
class _OpenBucket:
    """A bucket that still takes parameters."""

    parameters: list[int]
    offsets: list[int]
    elems: int
    last_position: int


def default_cap_bytes(bytes_per_s: float) -> int:
    """Cap of a bucket where hosts exchange at this rate; 0: there is one host, or nobody has measured."""
    if not bytes_per_s:
        return DEFAULT_BUCKET_CAP_BYTES
    return min(max(int(bytes_per_s * DEFAULT_BUCKET_S), FIRST_BUCKET_BYTES), DEFAULT_BUCKET_CAP_BYTES)


def assign_buckets(
    parameters: Sequence[torch.Tensor],
    *,
    cap_bytes: int,
    first_cap_bytes: int = FIRST_BUCKET_BYTES,
    caps_bytes: Sequence[int] = (),
    order: Sequence[int] | None = None,
    alignment_bytes: int = ALIGNMENT_BYTES,
) -> list[BucketPlan]:
    """Assigns each parameter to one bucket; returns the buckets in the order in which they will be complete.

    Parameters are walked in the order in which their gradients are expected. A bucket holds one dtype and is closed
    before the parameter that would lift it over its cap; a parameter above the cap has a bucket for itself. Buckets
    are sorted by their last parameter, the one that completes them.

    Args:
        parameters: in registration order; only their element counts and dtypes are used.
        cap_bytes: cap of a bucket.
        first_cap_bytes: cap of the first bucket of each dtype.
        caps_bytes: caps of the first, second, … bucket of each dtype in place of the two above; the last one goes on.
        order: indices in the order in which gradients are expected; default: reverse registration order.
        alignment_bytes: where a gradient may begin; 1 packs them without gaps.

    Raises:
        ValueError: a cap below 1 byte, or an order that is not a permutation of the parameters.
    """
    if min(cap_bytes, first_cap_bytes, *caps_bytes) < 1:
        raise ValueError(
            f"a bucket needs room for at least 1 byte: cap_bytes={cap_bytes}, first_cap_bytes={first_cap_bytes}"
            + (f", caps_bytes={list(caps_bytes)}" if caps_bytes else "")
        )
    walk = list(reversed(range(len(parameters)))) if order is None else list(order)
    # A parameter that is left out would keep its local gradient, and nothing would show it.
    if sorted(walk) != list(range(len(parameters))):
        raise ValueError(f"order must name each of the {len(parameters)} parameters once, got {walk}")

    # Buckets of several dtypes fill at the same time, because one collective adds one type.
    filling: dict[torch.dtype, _OpenBucket] = {}
    buckets_closed: dict[torch.dtype, int] = {}
    closed: list[tuple[int, BucketPlan]] = []

    def cap_of(dtype: torch.dtype) -> int:
        number = buckets_closed.get(dtype, 0)
        if caps_bytes:
            return caps_bytes[min(number, len(caps_bytes) - 1)]
        return cap_bytes if number else min(first_cap_bytes, cap_bytes)

    def close(dtype: torch.dtype) -> None:
        bucket = filling.pop(dtype)
        plan = BucketPlan(dtype, tuple(bucket.parameters), tuple(bucket.offsets), bucket.elems)
        closed.append((bucket.last_position, plan))
        buckets_closed[dtype] = buckets_closed.get(dtype, 0) + 1

    for position, index in enumerate(walk):
        dtype = parameters[index].dtype
        # Rounded up, so that the gradient behind it begins on a cache line too.
        multiple = max(1, alignment_bytes // dtype.itemsize)
        room_elems = -(-parameters[index].numel() // multiple) * multiple
        bucket = filling.get(dtype)
        if bucket is not None and (bucket.elems + room_elems) * dtype.itemsize > cap_of(dtype):
            close(dtype)
            bucket = None
        if bucket is None:
            bucket = filling[dtype] = _OpenBucket([], [], 0, position)
        bucket.parameters.append(index)
        bucket.offsets.append(bucket.elems)
        bucket.elems += room_elems
        bucket.last_position = position
    for dtype in list(filling):
        close(dtype)
    # Launched in this order on all ranks, so it should be that in which they are complete.
    return [plan for _, plan in sorted(closed, key=lambda entry: entry[0])]
