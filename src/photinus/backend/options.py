"""The call forms of torch's process group methods, brought to one: (…, options object).

torch's bindings overload each collective: `allreduce(tensors, options)`, `allreduce(tensors, op, timeout)`,
`allreduce(tensor, op, timeout)`. C++ and `torch.distributed` use the first form; libraries use the others too.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch import Tensor
from torch._C._distributed_c10d import AllreduceCoalescedOptions, AllreduceOptions

T = TypeVar("T")

UNSET = timedelta(milliseconds=-1)
"""What an options object holds when the caller gave no timeout: the group's own counts."""


def as_options(kind: type[T], given: Any, timeout: timedelta | None = None, **fields: Any) -> T:
    """`given`, where it is such an options object already; else a new one.

    Args:
        kind: class of torch's options.
        given: what the caller passed in their place: a timeout, or what `fields` name, or None.
        timeout: None where the caller gave none.
        fields: as the options call them: rootRank (in the group), reduceOp (default: sum); None leaves the default.
    """
    if isinstance(given, kind):
        return given
    options: Any = kind()
    timeout = given if isinstance(given, timedelta) else timeout
    for name, value in {**fields, "timeout": timeout}.items():
        if value is not None:
            setattr(options, name, value)
    made: T = options
    return made


def each_all_reduce(given: Any = None) -> AllreduceOptions:
    """Options for each tensor of a coalesced all_reduce, from its options, a ReduceOp or nothing (sum)."""
    if not isinstance(given, AllreduceCoalescedOptions):  # no subclass of AllreduceOptions in Python
        return as_options(AllreduceOptions, given, reduceOp=given)
    each = as_options(AllreduceOptions, None, given.timeout, reduceOp=given.reduceOp)
    each.asyncOp = given.asyncOp
    return each


def factor(op: Any) -> float:
    """What each rank multiplies its values by before PREMUL_SUM adds them. Raises ValueError where there is none."""
    _, given = op.__getstate__()  # the only way that torch offers
    if isinstance(given, Tensor) and given.numel() == 1:
        return float(given.item())
    if not isinstance(given, int | float):
        raise ValueError(f"PREMUL_SUM needs one factor, torch.distributed._make_nccl_premul_sum(factor), got {given!r}")
    return float(given)


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
