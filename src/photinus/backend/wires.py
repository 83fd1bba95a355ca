"""In which type the values of a reduction travel between hosts, where a group's maker or a caller wants another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from .. import engine
from .tensors import DTYPES

Wires: TypeAlias = Mapping[tuple[int, int], int]
"""The engine's code of that type, by those of the tensor's type and of the reduction."""

_FROM = {
    torch.bfloat16: [torch.float32],
    torch.float16: [torch.float32],
    torch.float32: [torch.bfloat16, torch.float16],
}
_COMPUTED = [engine.REDUCTIONS[name] for name in ("sum", "avg", "product", "premul_sum")]


@dataclass(frozen=True)
class Options:
    """What `init_process_group("photinus", pg_options=...)` and `new_group(..., pg_options=...)` take.

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
        wires(self.wire_dtype)


def wires(wire_dtype: torch.dtype | None) -> Wires:
    """What travels in another type than its own. Raises ValueError where nothing can travel so."""
    if wire_dtype is None:
        return {}
    if wire_dtype not in _FROM:
        raise ValueError(
            f"wire_dtype={wire_dtype!r}: values can travel between hosts as torch.bfloat16 or torch.float16 (float32 "
            f"ones, in half the bytes) or as torch.float32 (16-bit ones, unrounded)"
        )
    return {(DTYPES[dtype], reduction): DTYPES[wire_dtype] for dtype in _FROM[wire_dtype] for reduction in _COMPUTED}
