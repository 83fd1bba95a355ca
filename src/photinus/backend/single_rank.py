"""The communicator of a group of one: every collective is at most a copy, done when it is called."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import engine
from ..engine import Call
from ..errors import AbortedError, MismatchError
from . import cuda
from .tensors import DTYPES, Memory

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


class _Done:
    """The handle of an operation that is done."""

    source_rank = -1

    def wait(self, timeout_s: float = 0.0, sees: bool = True) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def error(self, sees: bool = True) -> BaseException | None:
        return None

    def see(self) -> bool:
        return False

    def duration_s(self) -> float:
        return 0.0

    def order(self, stream: int) -> None:
        pass

    def has_landed(self) -> bool:
        return True


_DONE = _Done()


class _Queued(_Done):
    """The same on a GPU: everything is in the stream that was current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = cuda.streams.record(device)

    def order(self, stream: int) -> None:  # which is the current one
        cuda.streams.follow(self._event, self._device)

    def has_landed(self) -> bool:
        return self._event.query()


class Alone:
    """The face of photinus.engine.Communicator for world size 1, without arena, socket or thread."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._ended: str | None = None

    def submit(self, call: Call, keep: object = None) -> _Done:
        """Copies the input to the output where they differ; a reduction over one rank is the value itself.

        Raises:
            ValueError: what two ranks may not, one may not: a reduction that means nothing on the element type.
            MismatchError: the two sides of an exchange by parts differ in size.
        """
        if not isinstance(keep, Memory) or keep.device is None:
            self.run(call)
            return _DONE
        self._do(call, keep.tensors())
        return _Queued(keep.device)

    def run(self, call: Call) -> None:
        """The same on the CPU's memory, without a handle."""
        self._do(call, None)

    def _do(self, call: Call, tensors: Sequence[Tensor] | None) -> None:
        """With the tensors that the call is about, where they are on a GPU."""
        self._check_open()
        operation, dtype = call.operation, call.dtype
        if operation in _REDUCING:
            reduction, elems = call.reduction, call.elems
            if _means_nothing(_REDUCTIONS[reduction], _DTYPES[dtype]):
                raise ValueError(
                    f"{_OPERATIONS[operation]}: {_REDUCTIONS[reduction]} means nothing on elements of "
                    f"{_DTYPES[dtype]}; convert the tensor to another type first"
                )
            if reduction == _PREMUL_SUM and elems:
                source, target = (_elements(address, elems, dtype, tensors) for address in (call.send, call.recv))
                wide = source.double() if source.dtype.itemsize > 2 else source.float()
                with torch.inference_mode():
                    target.copy_(wide.mul_(call.factor))
                return
        if sends := call.sends:
            (source_address, given), (target_address, wanted) = sends[0], call.recvs[0]
            if given != wanted:
                raise MismatchError(
                    f"{_OPERATIONS[operation]}: this rank alone sends itself {given} elements and receives {wanted}; "
                    f"no output was written"
                )
            _copy(source_address, target_address, given, dtype, tensors)
        elif operation != _BARRIER:
            _copy(call.send, call.recv, call.elems, dtype, tensors)

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


def _copy(source: int, target: int, elems: int, dtype: int, tensors: Sequence[Tensor] | None) -> None:
    if not elems or source == target:
        return
    if tensors is None:
        ctypes.memmove(target, source, elems * _DTYPES[dtype].itemsize)
        return
    with torch.inference_mode():
        _elements(target, elems, dtype, tensors).copy_(_elements(source, elems, dtype, tensors))


def _elements(address: int, elems: int, dtype: int, tensors: Sequence[Tensor] | None) -> Tensor:
    """The elements at an address as a tensor. A GPU's memory is reached through the tensors that have it."""
    kind = _DTYPES[dtype]
    nbytes = elems * kind.itemsize
    if tensors is None:
        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=kind)
    skipped, tensor = next(
        (address - tensor.data_ptr(), tensor)
        for tensor in tensors
        if tensor.data_ptr() <= address < tensor.data_ptr() + tensor.nbytes
    )
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)[skipped : skipped + nbytes].view(kind)
