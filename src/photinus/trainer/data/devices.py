"""Moving batches of any shape of nesting to a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["map_tensors", "pin_memory", "to_device"]


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


def to_device(data: Any, device: torch.device | None) -> Any:
    """`data` with its tensors on `device` (None: left where they are).

    Objects that move themselves (a packed sequence, a tokenizer's batch: anything with a method `to`) are asked to.
    Copies from pinned memory do not block; the stream orders them before what uses them.
    """
    if device is None:
        return data
    if not isinstance(data, (torch.Tensor, str, bytes)) and callable(getattr(data, "to", None)):
        return data.to(device)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=device.type == "cuda" and tensor.is_pinned())

    return map_tensors(data, move)


def pin_memory(data: Any) -> Any:
    """`data` with its CPU tensors in page-locked memory, from which a GPU copies without blocking Python."""
    return map_tensors(data, lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor)
