"""What each rank remembers, brought to rank 0 without pickle: the structure as JSON, the tensors as their bytes.

Every rank describes its state in JSON, in which a tensor is a dtype and a shape. All ranks read all descriptions, so
that what one of them cannot describe is an error on all. Then each rank in turn sends its tensors to rank 0, one by
one: beside the result, a rank needs room for the largest. Nothing that comes in is run, and nothing is made of it but
tensors, numbers, text, lists, tuples and dicts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .collectives import all_gather_bytes, control_device

_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)


def gather_states(state: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's state, by rank, on the group's rank 0; [] on the others. Called by all ranks of the group.

    Args:
        state: this rank's: nested dicts, lists and tuples of tensors, numbers, text and None.

    Returns:
        The states, with tensors on the CPU.

    Raises:
        TypeError: something in a rank's state is none of these; on all ranks, names the rank and the place.
    """
    tensors: list[torch.Tensor] = []
    try:
        mine = {"state": _describe(state, "state", tensors)}
    except TypeError as error:
        mine = {"error": str(error)}
    told = [json.loads(text) for text in all_gather_bytes(json.dumps(mine).encode(), group)]
    for rank, each in enumerate(told):
        if "error" in each:
            raise TypeError(f"rank {dist.get_global_rank(group, rank)}: {each['error']}")
    device = control_device(group)
    if group.rank() != 0:
        for tensor in tensors:
            if tensor.numel():
                dist.send(tensor.contiguous().view(-1).view(torch.uint8).to(device), group=group, group_dst=0)
        return []

    def receive_from(source: int) -> Callable[[torch.dtype, list[int]], torch.Tensor]:
        def tensor(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
            data = torch.empty(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8, device=device)
            if data.numel():
                dist.recv(data, group=group, group_src=source)
            return data.cpu().view(dtype).view(shape)

        return tensor

    own = iter(tensors)
    states = [_restore(told[0]["state"], lambda *_: next(own).cpu())]
    return states + [_restore(told[rank]["state"], receive_from(rank)) for rank in range(1, group.size())]


def _describe(value: Any, where: str, tensors: list[torch.Tensor]) -> Any:
    """The value as JSON; its tensors are added to `tensors`, in the order in which they are named."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) in _TENSORS and value.layout is torch.strided and not value.is_quantized:
        tensors.append(value.detach())
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if type(value) in (list, tuple):
        items = [_describe(item, f"{where}[{place}]", tensors) for place, item in enumerate(value)]
        return {type(value).__name__: items}
    if isinstance(value, dict):
        keys = [_describe(key, f"{where}, key {key!r}", []) for key in value]
        items = [_describe(item, f"{where}[{key!r}]", tensors) for key, item in value.items()]
        return {"dict": list(zip(keys, items, strict=True))}
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot go to another rank: it would "
        f"have to run code from it. Let the optimizer remember tensors, numbers, text, lists and dicts only."
    )


def _restore(told: Any, tensor: Callable[[torch.dtype, list[int]], torch.Tensor]) -> Any:
    """What `_describe` described; `tensor(dtype, shape)` gives the next tensor."""
    if not isinstance(told, dict):
        return told
    ((kind, content),) = told.items()
    if kind == "tensor":
        name, shape = content
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype), f"torch.{name} is no dtype"
        return tensor(dtype, shape)
    if kind == "dict":
        return {_restore(key, tensor): _restore(item, tensor) for key, item in content}
    items = [_restore(item, tensor) for item in content]
    return tuple(items) if kind == "tuple" else items
