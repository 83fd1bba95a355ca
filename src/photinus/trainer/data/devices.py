"""Moving batches of any shape of nesting to a device."""

from __future__ import annotations

from typing import Any

import torch

from ...parallel.exchange.tensors import map_tensors


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
