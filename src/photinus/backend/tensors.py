"""Which memory a collective works on: dense copies of tensors that are not dense, and the way back.

An exchange sees an address and a number of elements, so a tensor that is strided, permuted, conjugated or negated
lazily is copied to a dense one in its logical order first; an output is copied back when the operation is done.
(gloo reads the first `numel` elements of the storage instead: [3, 3, 1, 1] for a summed x[::2] of ones and twos.)
Complex tensors are exchanged as pairs of reals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import engine

__all__ = ["DTYPES", "REDUCTIONS", "CopyBack", "allocate", "check_cpu", "dense", "is_dense", "reals"]

DTYPES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in engine.DTYPES.items()}
"""The engine's code of each dtype that it computes with."""

_REDUCE_OPS = torch.distributed.ReduceOp
REDUCTIONS: dict[int, int] = {
    hash(_REDUCE_OPS.SUM): engine.REDUCTIONS["sum"],
    hash(_REDUCE_OPS.AVG): engine.REDUCTIONS["avg"],
    hash(_REDUCE_OPS.MIN): engine.REDUCTIONS["min"],
    hash(_REDUCE_OPS.MAX): engine.REDUCTIONS["max"],
    hash(_REDUCE_OPS.PRODUCT): engine.REDUCTIONS["product"],
}
"""The engine's code of each reduction, by hash(ReduceOp): its number in C++, and the cheapest thing to look up."""

_strided = torch.strided
_NOT_COMPLEX_LINEAR = frozenset(hash(op) for op in (_REDUCE_OPS.MIN, _REDUCE_OPS.MAX, _REDUCE_OPS.PRODUCT))


def is_dense(tensor: Tensor) -> bool:
    """Whether the exchange may read and write the tensor's memory as it lies."""
    return tensor.layout is _strided and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def check_cpu(tensor: Tensor) -> None:
    """Raises ValueError for a tensor that is not in CPU memory."""
    if not tensor.is_cpu:
        raise ValueError(
            f"backend photinus exchanges CPU tensors, got one on {tensor.device}; move it with .cpu(), or use a "
            f"backend for that device (nccl for CUDA)"
        )


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself when dense, otherwise a dense copy in logical order; complex ones as pairs of reals."""
    check_cpu(tensor)
    tensor = tensor.detach()
    if not is_dense(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def reals(tensor: Tensor, reduction: int) -> Tensor:
    """A complex tensor whose reduction is that of its parts, checked. Raises ValueError for min, max and product.

    Args:
        tensor: any tensor; only complex ones are checked.
        reduction: hash(ReduceOp).
    """
    if reduction in _NOT_COMPLEX_LINEAR and tensor.is_complex():
        raise ValueError("complex tensors can be reduced by SUM and AVG only, not by MIN, MAX or PRODUCT")
    return tensor


class CopyBack:
    """The outputs of one operation: hands out dense ones and copies them to the caller's when the operation is done."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

    def output(self, tensor: Tensor, *, load: bool) -> Tensor:
        """The tensor itself when dense, otherwise a dense stand-in, with the tensor's values if `load`."""
        check_cpu(tensor)
        tensor = tensor.detach()
        stand_in = tensor
        if not is_dense(tensor):
            stand_in = torch.empty(tensor.shape, dtype=tensor.dtype)
            if load:
                stand_in.copy_(tensor)
            self._copies.append((tensor, stand_in))
        return torch.view_as_real(stand_in) if stand_in.is_complex() else stand_in

    def parts(self, tensors: Sequence[Tensor]) -> Tensor:
        """One flat tensor for outputs of equal size: their own memory where they lie one behind the other, else new."""
        first = tensors[0]
        elems = first.numel()
        for tensor in tensors:
            check_cpu(tensor)
            if tensor.numel() != elems or tensor.dtype != first.dtype:
                raise ValueError(
                    f"the tensors of a list must have one size and dtype, got "
                    f"{[(tuple(t.shape), str(t.dtype)) for t in tensors]}"
                )
        step, start = elems * first.element_size(), first.data_ptr()
        adjacent = all(is_dense(t) and t.data_ptr() == start + i * step for i, t in enumerate(tensors))
        if adjacent and _one_storage(tensors):
            flat = first.detach().as_strided((elems * len(tensors),), (1,))
        else:
            flat = torch.empty(elems * len(tensors), dtype=first.dtype)
            for i, tensor in enumerate(tensors):
                self._copies.append((tensor.detach(), flat[i * elems : (i + 1) * elems].view(tensor.shape)))
        return torch.view_as_real(flat) if flat.is_complex() else flat

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """One new flat tensor, cut into the outputs, which may differ in size, when the operation is done."""
        for tensor in tensors:
            check_cpu(tensor)
        flat = torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype)
        pieces = torch.split(flat, [t.numel() for t in tensors])
        self._copies.extend((t.detach(), piece.view(t.shape)) for t, piece in zip(tensors, pieces, strict=True))
        return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat

    def __bool__(self) -> bool:
        return bool(self._copies)

    def __call__(self) -> None:
        """Copies every stand-in to its tensor. Inference mode: no graph, and the outputs may be inference tensors."""
        with torch.inference_mode():
            for tensor, stand_in in self._copies:
                tensor.copy_(stand_in)
        self._copies.clear()


def _one_storage(tensors: Sequence[Tensor]) -> bool:
    storage = tensors[0].untyped_storage().data_ptr()
    return all(t.untyped_storage().data_ptr() == storage for t in tensors)


def allocate(size: int | Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor in this process's arena, which the engine reduces where it lies.

    Args:
        size: number of elements, or a shape.
        dtype: of the elements.
    """
    shape = (size,) if isinstance(size, int) else tuple(size)
    elems = math.prod(shape)
    if elems == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(engine.allocate(elems * dtype.itemsize), dtype=dtype).view(shape)
