"""How one bucket travels: averaged as it is, or by a hook (`comm_hooks`), or in another precision."""

from __future__ import annotations

from typing import Protocol

import torch

from ..exchange.collectives import Average, Pending
from .gradient_memory import Bucket
from .streams import keep_until_read


class BucketExchange(Protocol):
    """Replaces the contents of a bucket by what the ranks make of theirs.

    Attributes:
        carries_tail: whether the elements behind the gradients are averaged too; if not, buckets have none.
    """

    carries_tail: bool

    def start(self, bucket: Bucket) -> Pending:
        """Starts it. When the returned work has been waited for, the bucket holds the result."""


class AverageExchange:
    """The average over the ranks.

    Args:
        wire_dtype: the type in which it travels between hosts, see `Average.start`; None: its own.
        dtype: in which floating gradients are averaged and sent; None: their own, in place.
    """

    carries_tail = True

    def __init__(
        self, average: Average, wire_dtype: torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self._average = average
        self._wire_dtype = wire_dtype
        self._dtype = dtype

    def start(self, bucket: Bucket) -> Pending:
        """See `BucketExchange`."""
        if self._dtype in (None, bucket.flat.dtype) or not bucket.flat.is_floating_point():
            return self._average.start(bucket.flat, self._wire_dtype)
        sent = bucket.flat.to(self._dtype)
        return _CopyBack(self._average.start(sent, self._wire_dtype), sent, bucket.flat)


class _CopyBack:
    """A work that brings its result home when it is waited for."""

    def __init__(self, work: Pending, result: torch.Tensor, home: torch.Tensor) -> None:
        self._work = work
        self._result = result
        self._home = home

    def wait(self) -> object:
        self._work.wait()
        keep_until_read(self._result)  # made in a hook, on the stream of the gradients
        return self._home.copy_(self._result)

    def is_completed(self) -> bool:
        return self._work.is_completed()
