"""Tensors inside nested values, and how a tensor lies in memory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch


def tensors_in(value: object) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples, sets, mappings and dataclasses, in order."""
    items: Iterable[object] = ()
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return [tensor for item in items for tensor in tensors_in(item)]


def map_tensors(data: Any, change: Callable[[Any], Any], *, also: Callable[[Any], bool] = lambda value: False) -> Any:
    """Applies `change` to tensors in tuples, named tuples, lists, mappings and dataclasses.

    Where something changes, their containers are copies. A mapping that cannot be written to becomes a dict. Everything
    else is handed through as it is.

    Args:
        also: which other values `change` takes as a whole, containers among them.
    """
    if isinstance(data, torch.Tensor) or also(data):
        return change(data)
    if isinstance(data, Mapping):
        changed = {key: map_tensors(value, change, also=also) for key, value in data.items()}
        if all(changed[key] is value for key, value in data.items()):
            return data
        if isinstance(data, MutableMapping):
            mapping = copy.copy(data)
            for key, value in changed.items():
                mapping[key] = value
            return mapping
        return changed
    if isinstance(data, (list, tuple)):
        values = [map_tensors(value, change, also=also) for value in data]
        if all(value is before for value, before in zip(values, data, strict=True)):
            return data
        if isinstance(data, list):
            sequence = copy.copy(data)
            sequence[:] = values
            return sequence
        make: Any = getattr(type(data), "_make", type(data))  # of named tuples
        another = make(values)
        if hasattr(data, "__dict__"):
            vars(another).update(vars(data))
        return another
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        filled = copy.copy(data)
        for field in dataclasses.fields(data):
            value = map_tensors(getattr(data, field.name), change, also=also)
            object.__setattr__(filled, field.name, value)  # of frozen ones, too
        return filled
    return data


def move_tensors(data: Any, device: torch.device, *, blocking: bool = False) -> Any:
    """Brings the tensors in nested containers to a device.

    Objects that move themselves (a packed sequence, a tokenizer's batch: anything with a method `to`) are asked to,
    wherever they lie. Copies from pinned memory do not block; the stream orders them before what uses them.
    """

    def moves_itself(value: Any) -> bool:
        return callable(getattr(value, "to", None)) and not isinstance(value, (type, torch.nn.Module))

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value.to(device)
        return value.to(device, non_blocking=not blocking and (value.is_pinned() or value.is_cuda))

    return map_tensors(data, move, also=moves_itself)


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides in which `tensor.numel()` elements without gaps hold a tensor of this shape.

    The tensor's own strides where it has no gaps and overlaps (a permuted layout such as channels_last is kept, so
    that gradients lie as their parameters do), contiguous ones else.
    """
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1 and stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()
