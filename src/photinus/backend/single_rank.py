"""The communicator of a group of one: every collective is at most a copy, done when it is called."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import engine
from ..errors import AbortedError, MismatchError
from .tensors import DTYPES

__all__ = ["Alone"]

_DTYPES = {code: dtype for dtype, code in DTYPES.items()}
_OPERATIONS = {code: name for name, code in engine.OPERATIONS.items()}
_REDUCTIONS = {code: name for name, code in engine.REDUCTIONS.items()}
_BARRIER = engine.OPERATIONS["barrier"]
_REDUCING = {engine.OPERATIONS[name] for name in ("all_reduce", "reduce", "reduce_scatter")}
_PREMUL_SUM = engine.REDUCTIONS["premul_sum"]


def _means_nothing(reduction: str, dtype: torch.dtype) -> bool:
    if reduction in ("band", "bor", "bxor"):
        return dtype.is_floating_point
    if reduction == "premul_sum":
        return not dtype.is_floating_point
    return reduction == "avg" and dtype is torch.bool


_REFUSED = {
    (reduction, code): f"{name} means nothing on elements of {dtype}; convert the tensor to another type first"
    for reduction, name in _REDUCTIONS.items()
    for code, dtype in _DTYPES.items()
    if _means_nothing(name, dtype)
}


class _Done:
    """The handle of an operation that is done."""

    source_rank = -1

    def wait(self, timeout_s: float = 0.0) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def error(self) -> BaseException | None:
        return None

    def duration_s(self) -> float:
        return 0.0


_DONE = _Done()


class Alone:
    """The face of photinus.engine.Communicator for world size 1, without arena, socket or thread."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._ended: str | None = None

    def submit(
        self,
        operation: int,
        send_address: int,
        recv_address: int,
        elems: int,
        dtype: int,
        reduction: int = 0,
        root: int = 0,
        timeout_s: float = 0.0,
        asynchronous: bool = True,
        keep: object = None,
        factor: float = 1.0,
        label: str = "",
        updates: int = 0,
    ) -> _Done:
        """Copies the input to the output where they differ; a reduction over one rank is the value itself.

        Raises:
            ValueError: what two ranks may not, one may not: a reduction that means nothing on the element type.
        """
        self._check_open()
        if operation in _REDUCING:
            if (reduction, dtype) in _REFUSED:
                raise ValueError(f"{_OPERATIONS[operation]}: {_REFUSED[reduction, dtype]}")
            if reduction == _PREMUL_SUM and elems:
                source, target = (_elements(address, elems, dtype) for address in (send_address, recv_address))
                target.copy_(source.double().mul_(factor) if source.dtype.itemsize > 2 else source.float().mul_(factor))
                return _DONE
        if operation != _BARRIER:
            _copy(send_address, recv_address, elems, dtype)
        return _DONE

    def exchange(
        self,
        operation: int,
        sends: Sequence[engine.Part],
        recvs: Sequence[engine.Part],
        dtype: int,
        root: int = 0,
        timeout_s: float = 0.0,
        asynchronous: bool = True,
        keep: object = None,
        label: str = "",
        updates: int = 0,
    ) -> _Done:
        """Copies the only part. Raises MismatchError where the two sides' sizes differ."""
        self._check_open()
        (source, given), (target, wanted) = sends[0], recvs[0]
        if given != wanted:
            raise MismatchError(
                f"{_OPERATIONS[operation]}: this rank alone sends itself {given} elements and receives {wanted}; no "
                f"output was written"
            )
        _copy(source, target, given, dtype)
        return _DONE

    def message(
        self,
        operation: int,
        address: int,
        elems: int,
        dtype: int,
        peer: int,
        tag: int = 0,
        timeout_s: float = 0.0,
        asynchronous: bool = True,
        keep: object = None,
    ) -> _Done:
        """Raises ValueError: there is nobody to exchange messages with."""
        self._check_open()
        raise ValueError(f"{_OPERATIONS[operation]}: there is no other rank in this group of 1 (peer {peer})")

    def abort(self, reason: str) -> None:
        """Refuses later operations."""
        self._ended = reason

    def set_reason(self, text: str) -> None:
        """Nobody is there to read it."""

    def close(self) -> None:
        """Refuses later operations."""
        self._ended = self._ended or "closed"

    def _check_open(self) -> None:
        if self._ended is not None:
            raise AbortedError(f"the communicator of this process alone has ended: {self._ended}")


def _copy(source: int, target: int, elems: int, dtype: int) -> None:
    if elems and source != target:
        ctypes.memmove(target, source, elems * _DTYPES[dtype].itemsize)


def _elements(address: int, elems: int, dtype: int) -> Tensor:
    """The elements at an address as a tensor."""
    kind = _DTYPES[dtype]
    return torch.frombuffer((ctypes.c_char * (elems * kind.itemsize)).from_address(address), dtype=kind)
