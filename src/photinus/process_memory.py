"""The memory of CPU tensors: huge pages, and what the heap of this process keeps between training steps."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import MutableMapping
from pathlib import Path

from .job.cgroup import text_of

# In GLIBC_TUNABLES of a process that starts: malloc asks the kernel for huge pages for all that it takes.
HUGE_HEAP = "glibc.malloc.hugetlb=1"
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def huge_pages(root: Path = Path("/")) -> str:
    """Return the kernel's setting for transparent huge pages: always, madvise or never; empty: it has none."""
    return text_of(root / "sys/kernel/mm/transparent_hugepage/enabled").partition("[")[2].partition("]")[0]


def use_huge_pages(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let torch ask the kernel for huge pages for CPU tensors of 2 MiB and more, unless the user decided.

    torch reads this variable once, when a process first allocates memory for a CPU tensor; later it has no effect.
    A large tensor that is freed and allocated again in each step then costs one page fault for 2 MiB, not 512. A kernel
    without huge pages would refuse, and torch would warn.
    """
    if huge_pages() in ("always", "madvise"):
        environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


@functools.cache
def reuse_memory() -> bool:
    """Use huge pages, and let the heap keep from now on the memory that a step frees. Return whether it keeps it.

    It does not where the user has set malloc's own variables, or put another allocator in its place.

    glibc returns the free top of the heap to the kernel when it is larger than a threshold (64 MiB at most by itself).
    A backward frees each gradient as soon as it lies in its bucket, and each activation, so the heap is cut after every
    step, and the next one touches every page again: the kernel zeroes it first, which takes a tenth of the step or
    more, and half of it with AdamW on large parameters. With higher thresholds the pages stay. Tensors above 1 GiB are
    mapped and unmapped one by one: their gaps in the heap would be too large. benchmarks/results/malloc.md has the gain
    in time and the cost in memory. (mallopt(3); older versions of glibc refuse a threshold above 32 MiB.)
    """
    use_huge_pages()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in musl
    is_users = any(os.environ.get(name) not in (None, "", HUGE_HEAP) for name in _USERS_OWN)
    if mallopt is None or is_users:
        return False
    trims, maps = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    return bool(mallopt(trims, 2**31 - 1) and (mallopt(maps, 1 << 30) or mallopt(maps, 32 << 20)))
