"""The memory that the heap of this process keeps between training steps."""

from __future__ import annotations

import ctypes
import os

PER_GRADIENTS = 4
"""Memory that a training step may free, in multiples of the gradients: gradients, their inputs and activations."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20  # what malloc takes; its own adjustment, which ends here too, is off from now on
_LARGEST_INT = 2**31 - 1
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")

_kept_bytes = 0


def keep_freed_memory(size_bytes: int) -> bool:
    """Lets the heap keep at least this many free bytes from now on; returns whether it does.

    It does not where the user has set malloc's own variables, or put another allocator in its place.

    glibc returns the free top of the heap to the kernel when it is larger than a threshold (64 MiB at most by itself).
    A backward frees each gradient as soon as it lies in its bucket, so the heap is cut after every step, and the next
    one touches every page again: the kernel zeroes it first, which for small batches takes a tenth of the step or more.
    With a threshold as large as the gradients, the pages stay. The peak stays the same; only what lies between peaks
    does not go back. (mallopt(3); tensors above 32 MiB are mapped and unmapped one by one whatever the thresholds.)
    """
    global _kept_bytes
    threshold = min(_LARGEST_INT, size_bytes)
    if threshold <= _kept_bytes:
        return True
    if any(os.environ.get(name) for name in _USERS_OWN):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in musl
    if mallopt is None:
        return False
    is_set = bool(mallopt(_TRIM_THRESHOLD, threshold)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))
    if is_set:
        _kept_bytes = threshold
    return is_set
