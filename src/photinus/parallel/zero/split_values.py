"""Slices of split tensors, through which users write, numbers, which count all parts, and random values.

Without this, DTensor's slices across parts are copies, so what is written into them is lost; `item()` of a sum, norm or
count is that of this rank's part; and ranks with one seed draw equal parts, by no generator of the user's. (Every rank
does the same with a split tensor, as with any DTensor.)
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ...errors import PhotinusError
from .split_states import gather_tensor, is_known_split, is_split, part_of, split_as

_aten: Any = torch.ops.aten
_SLICES = "select slice split split_with_sizes unbind diagonal unfold"
_OF_WHOLE = "normal_ uniform_ random_ exponential_ log_normal_ bernoulli_ bernoulli rand_like randn_like randint_like"
_OF_WHOLE += " geometric_ cauchy_ index_put_ index_fill_"  # the last two write into some rows
_FACTORIES = "eye zeros ones full arange linspace rand randn"  # with out=, in whose place torch puts the whole
_DIMS = ("dim", "dim1", "dim2", "dimension")


@functools.cache
def watch_values() -> None:
    """Changes what DTensor does, from now on."""
    handlers = _handlers()
    handlers[_aten.copy_.default] = handlers[_aten.fill_.Tensor] = _copy
    handlers[_aten._local_scalar_dense.default] = _number
    for handler, names in ((_slice, _SLICES), (_of_whole, _OF_WHOLE), (_of_whole, _FACTORIES)):
        for packet in (getattr(_aten, name) for name in names.split()):
            those = (name for name in packet.overloads() if ("out" in name) == (names is _FACTORIES))
            handlers.update({getattr(packet, name): handler for name in those})


class _Source:
    """A split tensor, and the whole that was gathered for slices of it."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.local = tensor, tensor._local_tensor
        self.whole = gather_tensor(tensor.detach()).contiguous()
        self._version = self._now()

    def _now(self) -> int:
        return 0 if self.tensor.is_inference() else self.tensor._version

    def check(self) -> None:
        """Refuses a slice of what has changed since."""
        if self._now() > self._version:
            raise PhotinusError(
                "a slice of a split tensor was used after the tensor changed (by a step, or by another slice), and it "
                "still has the old values. Take the slice again, as in `weight[0]`, each time you use it."
            )

    def write(self, region: torch.Tensor) -> None:
        """Takes this rank's part of what was written into a view of the whole."""
        where = torch.zeros_like(self.whole, dtype=torch.bool)
        where.as_strided(region.size(), region.stride(), region.storage_offset()).fill_(True)
        part, mask = part_of(self.whole, self.tensor), part_of(where, self.tensor)
        self.local.copy_(torch.where(mask, part, self.local))
        self._version += 1  # torch counts this write when it is over


@functools.cache
def _slice_class() -> Any:
    from torch.distributed.tensor import DTensor

    class Slice(DTensor):
        """A view of a gathered whole, equal on all ranks. What is written into it is written into the parts."""

        source: _Source
        is_asked = False  # torch calls this class, which older versions do not

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            cls.is_asked, kwargs = True, kwargs or {}
            slices = [each for each in _flat([*args, *kwargs.values()]) if isinstance(each, Slice)]
            for each in slices:
                each.source.check()
            written = [each for each in _flat(_written(func, args, kwargs)) if isinstance(each, Slice)]
            if written:
                func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
                for each in written:
                    each.source.write(each._local_tensor)
                return None if not func._schema.returns else written[0] if len(written) == 1 else written
            if func._schema._is_view_op():
                results = func(args[0]._local_tensor, *args[1:], **kwargs)
                return tree_map(functools.partial(_as_slice, args[0].source), results)
            return func(*tree_map(_as_split, args), **tree_map(_as_split, kwargs))

    return Slice


def _as_slice(source: _Source, view: torch.Tensor) -> Any:
    split: Any = _replicated(view, source.tensor.device_mesh)
    new = _slice_class()(view, split._spec, requires_grad=False)
    new.source = source
    return new


def _as_split(value: Any) -> Any:
    """A plain DTensor in the place of a slice."""
    return _replicated(value._local_tensor, value.device_mesh) if isinstance(value, _slice_class()) else value


def _replicated(view: torch.Tensor, mesh: Any) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(view, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _plain(value: Any) -> Any:
    """A whole tensor, the same on all ranks, in the place of a split one."""
    if isinstance(value, _slice_class()):
        return value._local_tensor
    return gather_tensor(value.detach()) if is_split(value) else value


def _flat(values: Any) -> list[Any]:
    return [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    arguments = func._schema.arguments
    values = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    writes = (a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return [values[name] for name in writes if name in values]


def _handlers() -> dict[Any, Any]:
    from torch.distributed.tensor import DTensor

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def _by_torch(op: Any, args: Any, kwargs: Any) -> Any:
    handlers = _handlers()
    ours = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = ours


def _is_cut(tensor: Any) -> bool:
    """Return whether a tensor lies in parts along dimensions, as FSDP2 cuts."""
    return _is_plainly_placed(tensor) and all(type(each).__name__ == "Shard" for each in tensor.placements)


def _is_plainly_placed(tensor: Any) -> bool:
    """Return whether each rank has a part, or all, of the values themselves."""
    # It holds a tensor of another class while torch compiles.
    return is_split(tensor) and type(tensor._local_tensor) is torch.Tensor and is_known_split(tensor)


def _slice(op: Any, args: Any, kwargs: Any) -> Any:
    tensor: Any = args[0]
    values = {argument.name: argument.default_value for argument in op._schema.arguments}
    values.update(zip(values, args, strict=False), **kwargs)
    dims = {values[name] % tensor.dim() for name in _DIMS if name in values} if tensor.dim() else set()
    takes_all = op is _aten.slice.Tensor and (values["start"] or 0) == 0 and values["step"] == 1
    takes_all = takes_all and (values["end"] is None or values["end"] >= tensor.shape[values["dim"]])
    if takes_all or not _is_cut(tensor) or not any(placement.dim in dims for placement in tensor.placements):
        return _by_torch(op, args, kwargs)
    source = _Source(tensor)
    slices = tree_map(functools.partial(_as_slice, source), op(source.whole, *args[1:], **kwargs))
    return slices if _keeps_writes(_flat([slices])[0]) else _by_torch(op, args, kwargs)


def _keeps_writes(view: torch.Tensor) -> bool:
    """Return whether this version of torch lets a slice see writes; warn once where it does not."""
    if not _slice_class().is_asked:
        view.detach().neg()
    if not _slice_class().is_asked:
        warnings.warn(
            f"a slice of a split tensor was taken. With torch {torch.__version__}, what is written into it is lost: "
            f"write into the whole tensor, as in weight.copy_(weight.full_tensor() * mask), or use torch 2.13",
            stacklevel=3,
        )
    return bool(_slice_class().is_asked)


def _of_whole(op: Any, args: Any, kwargs: Any) -> Any:
    """Calls it with whole tensors on each rank, as one process does, and takes this rank's part of the result."""
    tensor: Any = kwargs.get("out", args[0])
    if not _is_cut(tensor):
        return _by_torch(op, args, kwargs)
    whole = _plain(tensor)
    args, kwargs = tree_map(lambda value: whole if value is tensor else _plain(value), (args, kwargs))
    result = op(*args, **kwargs)
    if not op._schema.is_mutable:
        return split_as(result, tensor)
    tensor._local_tensor.copy_(part_of(whole, tensor))
    return tensor


def _copy(op: Any, args: Any, kwargs: Any) -> Any:
    tensor, value, *_ = args
    if op is _aten.fill_.Tensor and _is_plainly_placed(tensor):  # torch 2.11 has no rule for it
        tensor._local_tensor.fill_(_plain(value))
        return tensor
    if not _is_cut(tensor) or (is_split(value) and value.dim()):
        return _by_torch(op, args, kwargs)
    tensor._local_tensor.copy_(part_of(_plain(value).expand(tensor.shape), tensor))
    return tensor


def _number(op: Any, args: Any, kwargs: Any) -> Any:
    return gather_tensor(args[0].detach()).item()
