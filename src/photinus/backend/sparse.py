"""all_reduce of sparse tensors: every rank gathers all ranks' entries and adds them up in rank order.

The ranks meet twice: for the numbers of entries, which differ, and for the entries. The first meeting is
waited for here, asynchronous call or not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import engine
from ..engine import Call
from . import cuda
from .engine_group import EngineGroup
from .tensors import DTYPES, Memory, transfer_type

_ALL_GATHER = engine.OPERATIONS["all_gather"]
_SUM = hash(dist.ReduceOp.SUM)


def sparse_all_reduce(group: EngineGroup, tensor: Tensor, options: Any) -> dist.Work | None:
    """Adds the ranks' sparse_coo tensors, which must have one shape, dtype and number of sparse dimensions.

    Raises:
        TypeError: another sparse layout.
        ValueError: another reduction than SUM.
    """
    if tensor.layout is not torch.sparse_coo:
        raise TypeError(f"all_reduce takes dense and sparse_coo tensors, got one of layout {tensor.layout}")
    if hash(options.reduceOp) != _SUM:
        raise ValueError("sparse tensors can be reduced by SUM only")
    size, rank = group.size(), group.rank()
    # Fewer entries travel, and `indices()` exists for coalesced tensors only.
    own = tensor.detach().coalesce()
    shape, sparse_dims = tuple(own.shape), own.sparse_dim()
    # Ranks compare it, so other shapes or types are an error and no garbage.
    label = f"sparse all_reduce of {str(own.dtype).removeprefix('torch.')}{list(shape)}"
    if sparse_dims != own.dim():
        label += f" with {sparse_dims} sparse dimensions"

    counts = torch.empty(size, dtype=torch.int64, device="cpu")
    counts[rank] = own._nnz()
    address, int64 = counts.data_ptr(), DTYPES[torch.int64]
    timeout_s = group._timeout_s(options)
    # Where all_gather puts it, so it stays where it is.
    place = address + rank * counts.element_size()
    # Once, as both calls are of one moment.
    updates = group._updates.told()
    group._do(Call(_ALL_GATHER, place, address, 1, int64, timeout_s=timeout_s, label=label, updates=updates))
    entries: list[int] = counts.tolist()

    # By entry, so that each rank's lie one behind the other: [entries, sparse dimensions] and [entries, *dense].
    memory, own_values = Memory(), own.values()
    indices, values = memory.input(own.indices().t()), memory.input(own_values)
    all_indices = indices.new_empty(sum(entries), sparse_dims)
    all_values = own_values.new_empty(sum(entries), *own_values.shape[1:])
    flat_indices, flat_values = memory.output(all_indices, load=False), memory.output(all_values, load=False)
    call = Call(
        _ALL_GATHER,
        dtype=int64,
        timeout_s=timeout_s,
        asynchronous=options.asyncOp or memory.device is not None,
        label=label,
        updates=updates,
        sends=[_part(indices)] * size,
        recvs=[_part(part) for part in torch.split(flat_indices, entries)],
        **group._place(memory),
    )
    first = group._submit(call, memory)

    def finish() -> None:
        # It has ended: the values went through the same lane behind it.
        first.wait()
        if memory.device is not None:
            first.order(cuda.streams.current(memory.device))
        with torch.inference_mode():
            # Entries lie in the order of the ranks, and equal indices are added in it: the same bits everywhere.
            total = torch.sparse_coo_tensor(all_indices.t(), all_values, shape, check_invariants=False).coalesce()
            tensor.copy_(total)
        if memory.device is not None:  # made here, on another stream than that of whoever waits
            memory.add(tensor._indices(), tensor._values())

    memory.finally_ = finish
    return group._run(
        options,
        _ALL_GATHER,
        memory,
        [tensor],
        sends=[_part(values)] * size,
        recvs=[_part(part) for part in torch.split(flat_values, entries)],
        dtype=transfer_type(own.dtype)[0],
        label=label,
    )


def _part(part: Tensor) -> engine.Part:
    return part.data_ptr(), part.numel()
