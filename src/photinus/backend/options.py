"""The call forms of torch's process group methods, brought to one: (…, options object).

torch's bindings overload each collective: `allreduce(tensors, options)`, `allreduce(tensors, op, timeout)`,
`allreduce(tensor, op, timeout)`. C++ and `torch.distributed` use the first form; libraries use the others too.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

__all__ = [
    "UNSET",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "each_all_reduce",
    "factor",
    "gather",
    "one_tensor",
    "reduce",
    "reduce_scatter",
    "scatter",
    "tensor_list",
]

UNSET = timedelta(milliseconds=-1)
"""What an options object holds when the caller gave no timeout: the group's own counts."""


def all_reduce(given: Any = None, timeout: timedelta | None = None) -> AllreduceOptions:
    """Options from an options object, a ReduceOp or nothing (sum)."""
    return given if isinstance(given, AllreduceOptions) else _reduction(AllreduceOptions(), given, timeout)


def each_all_reduce(given: Any = None) -> AllreduceOptions:
    """Options for each tensor of a coalesced all_reduce, from its options, a ReduceOp or nothing (sum)."""
    if not isinstance(given, AllreduceCoalescedOptions):  # no subclass of AllreduceOptions in Python
        return all_reduce(given)
    each: AllreduceOptions = _reduction(AllreduceOptions(), given.reduceOp, given.timeout)
    each.asyncOp = given.asyncOp
    return each


def reduce_scatter(given: Any = None, timeout: timedelta | None = None) -> ReduceScatterOptions:
    """Options from an options object, a ReduceOp or nothing (sum)."""
    return given if isinstance(given, ReduceScatterOptions) else _reduction(ReduceScatterOptions(), given, timeout)


def reduce(given: Any = None, op: Any = None, timeout: timedelta | None = None) -> ReduceOptions:
    """Options from an options object, or from the root's group rank and a ReduceOp."""
    return given if isinstance(given, ReduceOptions) else _reduction(_root(ReduceOptions(), given), op, timeout)


def broadcast(given: Any = None, timeout: timedelta | None = None) -> BroadcastOptions:
    """Options from an options object or the root's group rank."""
    return given if isinstance(given, BroadcastOptions) else _with_timeout(_root(BroadcastOptions(), given), timeout)


def gather(given: Any = None, timeout: timedelta | None = None) -> GatherOptions:
    """Options from an options object or the root's group rank."""
    return given if isinstance(given, GatherOptions) else _with_timeout(_root(GatherOptions(), given), timeout)


def scatter(given: Any = None, timeout: timedelta | None = None) -> ScatterOptions:
    """Options from an options object or the root's group rank."""
    return given if isinstance(given, ScatterOptions) else _with_timeout(_root(ScatterOptions(), given), timeout)


def all_gather(given: Any = None, timeout: timedelta | None = None) -> AllgatherOptions:
    """Options from an options object, a timeout or nothing."""
    return given if isinstance(given, AllgatherOptions) else _with_timeout(AllgatherOptions(), given or timeout)


def all_to_all(given: Any = None, timeout: timedelta | None = None) -> AllToAllOptions:
    """Options from an options object, a timeout or nothing."""
    return given if isinstance(given, AllToAllOptions) else _with_timeout(AllToAllOptions(), given or timeout)


def barrier(given: Any = None, timeout: timedelta | None = None) -> BarrierOptions:
    """Options from an options object, a timeout or nothing."""
    return given if isinstance(given, BarrierOptions) else _with_timeout(BarrierOptions(), given or timeout)


def factor(op: Any) -> float:
    """What each rank multiplies its values by before PREMUL_SUM adds them. Raises ValueError where there is none."""
    _, given = op.__getstate__()  # the only way that torch offers
    if isinstance(given, Tensor) and given.numel() == 1:
        return float(given.item())
    if not isinstance(given, int | float):
        raise ValueError(f"PREMUL_SUM needs one factor, torch.distributed._make_nccl_premul_sum(factor), got {given!r}")
    return float(given)


def _reduction(options: Any, op: Any, timeout: timedelta | None) -> Any:
    if op is not None:
        options.reduceOp = op
    return _with_timeout(options, timeout)


def _root(options: Any, root: int | None) -> Any:
    if root is not None:
        options.rootRank = root
    return options


def _with_timeout(options: Any, timeout: timedelta | None) -> Any:
    if timeout is not None:
        options.timeout = timeout
    return options


def one_tensor(tensors: Tensor | Sequence[Tensor], operation: str) -> Tensor:
    """The only tensor of a list of one (or the tensor itself). Raises ValueError for any other number."""
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise ValueError(f"{operation} takes one tensor per rank, got {len(tensors)}")
    return tensors[0]


def tensor_list(lists: Any, operation: str) -> list[Tensor]:
    """The only list of tensors of a list of one list (or the list itself). Raises ValueError for any other number."""
    if len(lists) > 0 and isinstance(lists[0], Tensor):
        return list(lists)
    if len(lists) != 1:
        raise ValueError(f"{operation} takes one list of tensors per rank, got {len(lists)}")
    return list(lists[0])
