"""The options of a reducer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ReducerOptions:
    """The options of a Reducer. Equal on all ranks.

    Attributes:
        bucket_cap_bytes, caps_bytes: see `photinus.parallel.reducer.buckets.assign_buckets`.
        find_unused_parameters: a parameter without gradient counts as zero, or stays without when it got none on
            any rank. Otherwise it is an error.
        skip_unused: buckets of which no parameter is used are not exchanged; every rank must leave out the same.
        sparse: names of the parameters whose gradients are expected to be sparse.
        overlap: launch during backward. When False, everything is launched at its end: for models whose ranks use
            different parameters and exchange other things in backward (SyncBatchNorm) over the same group.
        static_graph: see `photinus.parallel.reducer.used_parameters`.
        gradients_are_views: `param.grad` may be written to by the next backward even if it was kept elsewhere.
        late_errors: raise what went wrong with a backward at the next forward.
        nan_guard: see `photinus.parallel.reducer.checks`.
        check_ranks: see `photinus.parallel.reducer.checks`.
        wire_dtype: the type in which buckets travel between hosts, where it fits theirs; None: their own.
        path: what messages call the model.
    """

    bucket_cap_bytes: int
    caps_bytes: tuple[int, ...] = ()
    find_unused_parameters: bool = False
    skip_unused: bool = False
    sparse: frozenset[str] = frozenset()
    overlap: bool = True
    static_graph: bool = False
    gradients_are_views: bool = False
    late_errors: bool = False
    nan_guard: bool = False
    check_ranks: bool = True
    wire_dtype: torch.dtype | None = None
    path: str = "the model"
