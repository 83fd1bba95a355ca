"""The communicator of a group of one: every collective is at most a copy, done when it is called."""

from __future__ import annotations

import ctypes

import torch

from .. import engine
from ..errors import AbortedError
from .tensors import DTYPES

__all__ = ["Alone"]

_ITEM_BYTES = {code: torch.empty(0, dtype=dtype).element_size() for dtype, code in DTYPES.items()}
_BARRIER = engine.OPERATIONS["barrier"]
_REDUCING = {engine.OPERATIONS["all_reduce"], engine.OPERATIONS["reduce_scatter"]}
_AVG = engine.REDUCTIONS["avg"]
_BOOL = engine.DTYPES["bool"]


class _Done:
    """The handle of an operation that is done."""

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
    ) -> _Done:
        """Copies the input to the output where they differ; a reduction over one rank is the value itself."""
        if self._ended is not None:
            raise AbortedError(f"the communicator of this process alone has ended: {self._ended}")
        if reduction == _AVG and dtype == _BOOL and operation in _REDUCING:  # what two ranks may not, one may not
            raise ValueError("an average of booleans means nothing; convert them to a number type first")
        if operation != _BARRIER and elems and send_address != recv_address:
            ctypes.memmove(recv_address, send_address, elems * _ITEM_BYTES[dtype])
        return _DONE

    def abort(self, reason: str) -> None:
        """Refuses later operations."""
        self._ended = reason

    def set_reason(self, text: str) -> None:
        """Nobody is there to read it."""

    def close(self) -> None:
        """Refuses later operations."""
        self._ended = self._ended or "closed"
