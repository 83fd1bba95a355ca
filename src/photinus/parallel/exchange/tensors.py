"""Tensors inside nested values, and how a tensor lies in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["dense_strides", "map_tensors", "tensors_in"]


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


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of nested lists, tuples (named ones too) and dicts with each tensor changed; anything else as it is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


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
