"""The options of a group, and those of a call: torch passes these in many forms, which are brought to one here.

torch's bindings overload each collective: `allreduce(tensors, options)`, `allreduce(tensors, op, timeout)`,
`allreduce(tensor, op, timeout)`. C++ and `torch.distributed` use the first form; libraries use the others too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceCoalescedOptions, AllreduceOptions

from .. import engine
from .tensors import DTYPES

T = TypeVar("T")

UNSET = timedelta(milliseconds=-1)
"""What an options object holds when the caller gave no timeout: the group's own counts."""


def as_options(kind: type[T], argument: Any, timeout: timedelta | None = None, **fields: Any) -> T:
    """`argument`, where it is such an options object already; else a new one.

    Args:
        kind: class of torch's options.
        argument: what the caller passed in their place: a timeout, or what `fields` name, or None.
        timeout: None where the caller gave none.
        fields: as the options call them: rootRank (in the group), reduceOp (default: sum); None leaves the default.
    """
    if isinstance(argument, kind):
        return argument
    options: Any = kind()
    # Some forms have the timeout in the place of the options.
    timeout = argument if isinstance(argument, timedelta) else timeout
    for name, value in {**fields, "timeout": timeout}.items():
        if value is not None:
            setattr(options, name, value)
    result: T = options
    return result


def each_all_reduce(argument: Any = None) -> AllreduceOptions:
    """Options for each tensor of a coalesced all_reduce, from its options, a ReduceOp or nothing (sum)."""
    if not isinstance(argument, AllreduceCoalescedOptions):  # no subclass of AllreduceOptions in Python
        return as_options(AllreduceOptions, argument, reduceOp=argument)
    each = as_options(AllreduceOptions, None, argument.timeout, reduceOp=argument.reduceOp)
    each.asyncOp = argument.asyncOp
    return each


def factor(op: Any) -> float:
    """Return the factor of this rank for PREMUL_SUM. Raises ValueError if there is none."""
    _, value = op.__getstate__()  # the only way that torch offers
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value.item())
    if not isinstance(value, int | float):
        raise ValueError(f"PREMUL_SUM needs one factor, torch.distributed._make_nccl_premul_sum(factor), got {value!r}")
    return float(value)


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
        # Libraries pass the inner list alone.
        return list(lists)
    if len(lists) != 1:
        raise ValueError(f"{operation} takes one list of tensors per rank, got {len(lists)}")
    return list(lists[0])


Wires: TypeAlias = Mapping[tuple[int, int], int]
"""The engine's code of that type, by those of the tensor's type and of the reduction."""

_FROM = {
    torch.bfloat16: [torch.float32],
    torch.float16: [torch.float32],
    torch.float32: [torch.bfloat16, torch.float16],
}
# The others (min, max, bits) choose or cut values, and a rounded one would be a value that no rank had.
_COMPUTED = [engine.REDUCTIONS[name] for name in ("sum", "avg", "product", "premul_sum")]


@dataclass(frozen=True)
class Options:
    """Options for `init_process_group("photinus", pg_options=...)` and `new_group(..., pg_options=...)`.

    Attributes:
        wire_dtype: the type in which sums, averages and products travel between hosts; inside a host nothing changes,
            and all ranks get the same bits. Other operations and types, of which it says nothing, travel as they are.
            torch.bfloat16, torch.float16: all_reduce, reduce and reduce_scatter of float32 in half the bytes. They are
            added in float32. (In float16 a sum beyond 65,504 becomes infinite.)
            torch.float32: those of bfloat16 and float16 tensors are not rounded before the end: 1.5 times the bytes
            (all_reduce), and the bits that one host gives.

    Raises:
        ValueError: another type.
    """

    wire_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        # Now, where the traceback shows the line of the user.
        wires(self.wire_dtype)


def wires(wire_dtype: torch.dtype | None) -> Wires:
    """Return the types that travel as a different type. Raises ValueError for a type that cannot."""
    if wire_dtype is None:
        return {}
    if wire_dtype not in _FROM:
        raise ValueError(
            f"wire_dtype={wire_dtype!r}: values can travel between hosts as torch.bfloat16 or torch.float16 (float32 "
            f"ones, in half the bytes) or as torch.float32 (16-bit ones, unrounded)"
        )
    return {(DTYPES[dtype], reduction): DTYPES[wire_dtype] for dtype in _FROM[wire_dtype] for reduction in _COMPUTED}
