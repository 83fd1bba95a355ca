"""The arguments of a call, brought to one form: torch's options in their many forms, and tensors as dense memory.

torch's bindings overload each collective: `allreduce(tensors, options)`, `allreduce(tensors, op, timeout)`,
`allreduce(tensor, op, timeout)`. C++ and `torch.distributed` use the first form; libraries use the others too.

An exchange sees an address and a number of elements, so a tensor that is strided, permuted, conjugated or negated
lazily is copied to a dense one in its logical order first; an output is copied back when the operation is done.
(gloo reads the first `numel` elements of the storage instead: [3, 3, 1, 1] for a summed x[::2] of ones and twos.)
Complex tensors are exchanged as pairs of reals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceCoalescedOptions, AllreduceOptions

from .. import engine

T = TypeVar("T")

DTYPES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in engine.DTYPES.items()}
"""The engine's code of each dtype that it computes with."""

_REDUCE_OPS = torch.distributed.ReduceOp
REDUCTIONS: dict[int, int] = {
    hash(_REDUCE_OPS.SUM): engine.REDUCTIONS["sum"],
    hash(_REDUCE_OPS.AVG): engine.REDUCTIONS["avg"],
    hash(_REDUCE_OPS.MIN): engine.REDUCTIONS["min"],
    hash(_REDUCE_OPS.MAX): engine.REDUCTIONS["max"],
    hash(_REDUCE_OPS.PRODUCT): engine.REDUCTIONS["product"],
    hash(_REDUCE_OPS.BAND): engine.REDUCTIONS["band"],
    hash(_REDUCE_OPS.BOR): engine.REDUCTIONS["bor"],
    hash(_REDUCE_OPS.BXOR): engine.REDUCTIONS["bxor"],
    hash(_REDUCE_OPS.PREMUL_SUM): engine.REDUCTIONS["premul_sum"],
}
"""The engine's code of each reduction, by hash(ReduceOp): its number in C++, and the cheapest thing to look up."""

UNSET = timedelta(milliseconds=-1)
"""The timeout in an options object when the caller gave none: the group's own timeout applies."""


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


_strided = torch.strided
# The sum of complex numbers is that of their parts. Their product is not, and they have no order.
_LINEAR = frozenset(hash(op) for op in (_REDUCE_OPS.SUM, _REDUCE_OPS.AVG, _REDUCE_OPS.PREMUL_SUM))

_COMPLEX = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by item size


def is_dense(tensor: Tensor) -> bool:
    """Return whether the exchange may read and write the tensor's memory directly."""
    return tensor.layout is _strided and tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def transfer_type(dtype: torch.dtype) -> tuple[int, str]:
    """As what the engine moves elements of any dtype without computing: its code, and a label for all ranks to compare.

    Complex numbers go as pairs of reals, what the engine does not know as integers of the same size; the label keeps
    them apart from real ones. Raises TypeError for quantised dtypes: their scale would stay behind.
    """
    found = _moved.get(dtype)
    if found is None:
        name = str(dtype).removeprefix("torch.")
        if name.startswith(("q", "float4")) or dtype.itemsize not in (1, 2, 4, 8):
            raise TypeError(f"backend photinus can't exchange tensors of {name}; exchange their parts")
        # An integer of the same size: copying its bits copies any type.
        found = _moved[dtype] = DTYPES[_INTEGERS[dtype.itemsize]], name
    return found


_moved: dict[torch.dtype, tuple[int, str]] = {
    **{dtype: (code, "") for dtype, code in DTYPES.items()},
    **{pair: (DTYPES[real], str(pair).removeprefix("torch.")) for pair, real in _COMPLEX.items()},
}


def check_dense(tensor: Tensor) -> None:
    """Raises ValueError for a tensor that is in the memory of neither the CPU nor a GPU, TypeError for a sparse one."""
    if tensor.layout is not _strided:
        raise TypeError(
            f"this collective of backend photinus takes dense tensors, got one of layout {tensor.layout}; all_reduce "
            f"takes sparse_coo too"
        )
    if not tensor.is_cpu and not tensor.is_cuda:
        raise ValueError(
            f"backend photinus exchanges CPU and CUDA tensors, got one on {tensor.device}; move it with .cpu(), or use "
            f"a backend for that device"
        )


def check_apart(tensor: Tensor) -> None:
    """Raises ValueError for an output whose elements share memory: an expanded one, or windows that overlap."""
    steps = [abs(stride) * (size - 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    # Strides reach this many places at most, so with more elements some share one.
    if tensor.numel() > sum(steps) + 1:
        raise ValueError(
            f"a collective can't write to a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}: its "
            f"elements share memory. Give it a .contiguous() copy."
        )


def reals(tensor: Tensor, reduction: int) -> Tensor:
    """A complex tensor whose reduction is that of its parts, checked. Raises ValueError for all but the linear ones."""
    if reduction not in _LINEAR and tensor.is_complex():
        raise ValueError("complex tensors can be reduced by SUM, AVG and PREMUL_SUM only")
    return tensor


class Memory:
    """The tensors of one call, all on one device: hands out dense ones, and copies results to those that are not dense.

    Attributes:
        device: the GPU, None for the CPU; known from the first tensor on.
        finally_: called behind the copies.
    """

    # Nearly every call makes one.
    __slots__ = ("_copies", "_tensors", "device", "finally_")

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.finally_: Callable[[], None] | None = None
        self._tensors: list[Tensor] = []
        self._copies: list[tuple[Tensor, Tensor]] = []

    def input(self, tensor: Tensor) -> Tensor:
        """The tensor itself when dense, otherwise a dense copy in logical order; complex ones as pairs of reals."""
        tensor = self._checked(tensor)
        if not is_dense(tensor):
            # Lazily conjugated and negated tensors lie in memory as they were before.
            tensor = tensor.resolve_conj().resolve_neg().contiguous()
        return self._hold(tensor)

    def output(self, tensor: Tensor, *, load: bool) -> Tensor:
        """The tensor itself when dense, otherwise a dense stand-in, with the tensor's values if `load`.

        Raises:
            ValueError: elements of the tensor share memory, so that it can't hold what it is to get.
        """
        tensor = self._checked(tensor)
        if is_dense(tensor):
            return self._hold(tensor)
        check_apart(tensor)
        stand_in = tensor.new_empty(tensor.shape)
        # Only what the call reads has to be copied in.
        if load:
            stand_in.copy_(tensor)
        self._copies.append((tensor, stand_in))
        return self._hold(stand_in)

    def _checked(self, tensor: Tensor) -> Tensor:
        check_dense(tensor)
        device = None if tensor.is_cpu else tensor.device
        if not self._tensors:
            self.device = device
        elif device != self.device:
            raise ValueError(
                f"the tensors of one call must be on one device, got one on {self.device or 'cpu'} and one on "
                f"{tensor.device}; move them to one device"
            )
        # Autograd must not record what the engine reads and writes behind its back.
        return tensor.detach()

    def _hold(self, tensor: Tensor) -> Tensor:
        # Until the exchange has ended, as the engine has addresses only.
        self._tensors.append(tensor)
        return torch.view_as_real(tensor) if tensor.is_complex() else tensor

    def __bool__(self) -> bool:
        # Most calls have nothing to do afterwards, and their work then keeps nothing for it.
        return bool(self._copies) or self.finally_ is not None

    def __call__(self) -> None:
        """Copies every stand-in to its tensor. Inference mode: no graph, and the outputs may be inference tensors."""
        with torch.inference_mode():
            for tensor, stand_in in self._copies:
                tensor.copy_(stand_in)
        self._copies.clear()
        act, self.finally_ = self.finally_, None  # which holds this object in turn
        if act is not None:
            act()

    def add(self, *tensors: Tensor) -> None:
        """Takes more tensors that whoever waits for the call is going to read."""
        self._tensors.extend(tensors)

    def tensors(self) -> list[Tensor]:
        """All whose memory the call reads or writes."""
        return [*self._tensors, *(tensor for tensor, _ in self._copies)]

    def release(self) -> None:
        """The call is done with the memory."""
        self._tensors, self._copies = [], []
        self.finally_ = None


def allocate(size: int | Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor in this process's arena, which the engine reduces where it lies."""
    shape = (size,) if isinstance(size, int) else tuple(size)
    elems = math.prod(shape)
    # torch.frombuffer refuses empty memory.
    if elems == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(engine.allocate(elems * dtype.itemsize), dtype=dtype).view(shape)
