"""States that lie on several ranks, made whole; and whole ones, split.

A state is nested dicts, lists and tuples with tensors and plain values at the leaves. Tensors of a class that knows
`full_tensor` are split ones; DTensor itself is not imported before there is one, because that takes long.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..exchange.agreement import gather_per_rank, place_in_group
from ..exchange.collectives import control_device

_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)


def is_split(value: object) -> bool:
    """Return whether a tensor lies in parts on several ranks."""
    # Most are of these classes, and loops ask this of each parameter in each step.
    return type(value) not in _TENSORS and isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def own_part(tensor: Any) -> Any:
    """Return this rank's part of a tensor that lies on several ranks; another one as it is."""
    return tensor.to_local() if is_split(tensor) else tensor


def map_state(
    state: Any, change: Callable[[torch.Tensor], Any], other: Callable[[Any], Any] = lambda value: value
) -> Any:
    """The state with `change(tensor)` in the place of each tensor, and `other(value)` in that of all else.

    Containers are new, and keep class and attributes. Tensors are visited in the order of the containers, which is
    equal on all ranks where the states are.
    """
    if isinstance(state, torch.Tensor):
        return change(state)
    if isinstance(state, dict):
        new = copy.copy(state)  # an OrderedDict keeps its _metadata
        for key, value in state.items():
            new[key] = map_state(value, change, other)
        return new
    if type(state) in (list, tuple):
        return type(state)(map_state(value, change, other) for value in state)
    return other(state)


def gather_state(state: Any) -> Any:
    """The state with whole tensors on rank 0; elsewhere None in the place of split ones. Called by all ranks.

    One tensor is gathered at a time and brought to the CPU, so beside the result a rank needs room for the largest.
    """
    keeps = place_in_group()[0] == 0

    def whole(tensor: torch.Tensor) -> torch.Tensor | None:
        if not is_split(tensor):
            return tensor
        full = gather_tensor(tensor.detach())
        return full.cpu() if keeps else None

    return map_state(state, whole)


def gather_tensor(tensor: Any) -> torch.Tensor:
    """Returns `tensor.full_tensor()`, by a call that every backend has for its devices.

    torch's own uses a call that gloo has for the CPU only: with CUDA tensors the process crashes (torch 2.11, see
    pytorch#132471).
    """
    from torch.distributed.tensor import Shard

    count = tensor.shape[0] if tensor.dim() else 0
    if tuple(tensor.placements) != (Shard(0),) or count == 0:
        full: torch.Tensor = tensor.full_tensor()
        return full
    local, group = tensor.to_local(), tensor.device_mesh.get_group()
    rows = -(-count // group.size())  # of each rank but the last ones, as torch.chunk cuts
    padded = local.new_zeros((rows, *local.shape[1:]))
    padded[: len(local)] = local
    gathered: torch.Tensor = local.new_empty((group.size(), *padded.shape))
    dist.all_gather(list(gathered), padded, group=group)
    return gathered.flatten(0, 1)[:count]


def gather_states(state: Any, group: dist.ProcessGroup) -> list[Any]:
    """Every rank's state, by rank, on the group's rank 0; [] on the others. Called by all ranks of the group.

    All ranks read the outlines of all states, so that what one of them cannot send is an error on all. Then each rank
    in turn sends its tensors to rank 0, one by one: beside the result, a rank needs room for the largest. Nothing that
    comes in is run, and nothing is made of it but tensors, numbers, text, lists, tuples and dicts.

    Args:
        state: this rank's: nested dicts, lists and tuples of tensors, numbers, text and None.

    Returns:
        The states, with tensors on the CPU.

    Raises:
        TypeError: something in a rank's state is none of these; on all ranks, names the rank and the place.
    """
    tensors: list[torch.Tensor] = []
    try:
        mine = {"state": _outline(state, "state", tensors)}
    except TypeError as error:
        mine = {"error": str(error)}
    outlines = gather_per_rank(mine, group)
    for rank, each in enumerate(outlines):
        if "error" in each:
            raise TypeError(f"rank {dist.get_global_rank(group, rank)}: {each['error']}")
    device = control_device(group)
    if group.rank() != 0:
        for tensor in tensors:
            if tensor.numel():
                dist.send(tensor.contiguous().view(-1).view(torch.uint8).to(device), group=group, group_dst=0)
        return []

    def receive(source: int, like: torch.Tensor) -> torch.Tensor:
        data = torch.empty(like.nbytes, dtype=torch.uint8, device=device)
        if data.numel():
            dist.recv(data, group=group, group_src=source)
        return data.cpu().view(like.dtype).view(like.shape)

    own = iter(tensors)
    states = [map_state(outlines[0]["state"], lambda _: next(own).cpu())]
    return states + [map_state(outlines[rank]["state"], partial(receive, rank)) for rank in range(1, group.size())]


def _outline(value: Any, where: str, tensors: list[torch.Tensor]) -> Any:
    """The value with meta tensors, which hold no data, in the place of its tensors; these are added to `tensors`."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    for kind in (bool, int, float, str):  # plain ones of their subclasses: a class cannot be loaded without its code
        if isinstance(value, kind):
            return kind(value)
    if type(value) in _TENSORS and value.layout is torch.strided and not value.is_quantized:
        tensors.append(value.detach())
        return value.detach().to("meta")
    if type(value) in (list, tuple):
        return type(value)(_outline(item, f"{where}[{place}]", tensors) for place, item in enumerate(value))
    if isinstance(value, dict):
        return {
            _outline(key, f"{where}, key {key!r}", []): _outline(item, f"{where}[{key!r}]", tensors)
            for key, item in value.items()
        }
    if value is None:
        return None
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot go to another rank: it would "
        f"have to run code from it. Let the optimizer remember tensors, numbers, text, lists and dicts only."
    )


def copy_state(state: Any, device: torch.device | None = None) -> Any:
    """The state with copies of all tensors and values, on `device` or where they are; split ones stay split."""
    copies: dict[int, torch.Tensor] = {}  # one tensor in two places stays one: who keeps the state may write into it

    def copy_of(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            stays = device is None or is_split(tensor)  # a split tensor has to stay on the device of its group
            copies[id(tensor)] = tensor.detach().clone() if stays else tensor.detach().to(device, copy=True)
        return copies[id(tensor)]

    return map_state(state, copy_of, copy.deepcopy)


def is_known_split(tensor: Any) -> bool:
    """Return whether `part_of` knows how a tensor is split."""
    return not is_split(tensor) or {type(each).__name__ for each in tensor.placements} <= {"Shard", "Replicate"}


def part_of(full: torch.Tensor, like: Any) -> torch.Tensor:
    """This rank's part of a whole tensor, as a view, split as the DTensor `like` is. Exchanges nothing.

    Raises:
        ValueError: `like` is split in a way that is not known here.
    """
    from torch.distributed.tensor import Replicate, Shard

    for dim, placement in enumerate(like.placements):
        if type(placement) is Shard:
            parts = torch.chunk(full, like.device_mesh.size(dim), placement.dim)
            place = like.device_mesh.get_local_rank(dim)
            full = parts[place] if place < len(parts) else full.narrow(placement.dim, 0, 0)
        elif type(placement) is not Replicate:
            raise ValueError(f"a tensor is split as {placement}; only Shard and Replicate can be loaded into")
    return full


def split_as(full: torch.Tensor, like: Any) -> torch.Tensor:
    """A DTensor with a copy of this rank's part of `full`, on the device of `like`; split as it, where shapes agree.

    A tensor of another shape (the row and column means of Adafactor) is held whole by every rank.
    """
    from torch.distributed.tensor import DTensor, Replicate

    local = like.to_local()
    placements = like.placements
    if full.shape == like.shape:
        part = part_of(full, like)
    else:
        part, placements = full, [Replicate()] * like.device_mesh.ndim
    part = part.detach().to(local.device, copy=True).contiguous()
    contiguous = torch.empty(full.shape, device="meta").stride()
    split: torch.Tensor = DTensor.from_local(
        part, like.device_mesh, placements, run_check=False, shape=full.shape, stride=contiguous
    )
    return split
