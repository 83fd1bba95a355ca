"""Tensors inside nested values, and how a tensor lies in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def tensors_in(value: object) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples, sets, mappings and dataclasses, in order."""
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _collect(value: object, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect(item, found)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            _collect(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), found)


def map_tensors(data: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`data` with `change` applied to its tensors, in tuples, named tuples, lists and mappings at any depth.

    Containers are made anew (a mapping whose class cannot be made from a dict becomes a dict); everything else is
    handed through as it is.
    """
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, Mapping):
        changed = {key: map_tensors(value, change) for key, value in data.items()}
        try:
            return type(data)(changed)  # type: ignore[call-arg]
        except TypeError:
            return changed
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_tensors(value, change) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(map_tensors(value, change) for value in data)
    return data


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
