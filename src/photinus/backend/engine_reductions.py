"""all_reduce (of sparse tensors, too), reduce and reduce_scatter through the engine, and so the whole process group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ReduceOptions, ReduceScatterOptions

from .. import engine
from ..engine import Call
from ..waiting_time import waiting_time
from . import torch_tools
from .arguments import (
    DTYPES,
    REDUCTIONS,
    UNSET,
    Memory,
    Wires,
    as_options,
    check_dense,
    factor,
    one_tensor,
    reals,
    tensor_list,
    transfer_type,
    wires,
)
from .engine_group import EngineGroup, check_elems, check_same_dtype, one_shape, whole
from .engine_moves import EngineMoves, part_of
from .torch_tools import outside_dynamo, profiler_is_on
from .work import EngineWork, JoinedWork

_ALL_REDUCE = engine.OPERATIONS["all_reduce"]
_ALL_GATHER = engine.OPERATIONS["all_gather"]
_REDUCE = engine.OPERATIONS["reduce"]
_REDUCE_SCATTER = engine.OPERATIONS["reduce_scatter"]
_PREMUL_SUM = engine.REDUCTIONS["premul_sum"]
_SUM = hash(dist.ReduceOp.SUM)
_COMPUTED = {  # of any dtype that the engine can compute with
    **DTYPES,
    # Reduced as pairs of reals, see `tensors`.
    torch.complex64: DTYPES[torch.float32],
    torch.complex128: DTYPES[torch.float64],
}
_strided = torch.strided


@outside_dynamo
class ThroughEngine(EngineMoves):
    """A group whose collectives and messages all go through the engine.

    Wrong arguments raise ValueError, element types that nobody computes with TypeError.
    """

    def allreduce(
        self,
        tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
        wires: Wires | None = None,
    ) -> dist.Work | None:
        """Reduces each element over the ranks, in place. Sparse tensors: SUM. `wires` in place of the group's."""
        options = opts
        if type(opts) is not AllreduceOptions:
            options = as_options(AllreduceOptions, opts, timeout, reduceOp=opts if op is None else op)
        tensor = tensors[0] if type(tensors) is list and len(tensors) == 1 else one_tensor(tensors, "all_reduce")
        reduction = REDUCTIONS[hash(options.reduceOp)]
        code = DTYPES.get(tensor.dtype)
        memory: Memory | None = None
        if (
            code is not None
            and tensor.is_cpu
            and tensor.layout is _strided
            and tensor.is_contiguous()
            and not tensor.is_neg()
        ):
            values = tensor
        elif tensor.layout is not _strided:
            # torch has no other call for sparse tensors.
            return _sparse_all_reduce(self, tensor, options)
        else:
            code = _compute("all_reduce", tensor)
            memory = Memory()
            values = memory.output(reals(tensor, hash(options.reduceOp)), load=True)
            if memory.device is not None:
                how = self._reduction(options, code, wires)
                where = whole(values, values)
                return self._run(options, _ALL_REDUCE, memory, [tensor], **where, **how, shape=tensor.shape)
        limit, address, asynchronous = options.timeout, values.data_ptr(), options.asyncOp
        if wires is None:
            wires = self._wires
        # Spelt out, not by _run: DDP and every training loop pass here.
        call = Call(
            _ALL_REDUCE,
            address,
            address,
            values.numel(),
            code,
            reduction,
            0,
            self._limit.timeout_s if limit == UNSET else limit.total_seconds(),
            asynchronous,
            factor(options.reduceOp) if reduction == _PREMUL_SUM else 1.0,
            "",
            self._updates.step_number(),
            wires.get((code, reduction)) if wires else None,
            tensor.shape,
        )
        # Only these need a work, or somebody to take the time.
        if asynchronous or waiting_time.on or profiler_is_on():
            return self._start(call, values.untyped_storage(), [tensor], memory)  # a tensor may get another storage
        self._do(call)  # here: the engine looks at each frame up to the user's, which costs 0.1 microseconds
        if memory:
            memory()
        return None

    def all_reduce_as(self, tensor: Tensor, op: Any, wire_dtype: torch.dtype) -> dist.Work | None:
        """Starts an all_reduce whose values travel between hosts as `wire_dtype`; see `Options`."""
        options = as_options(AllreduceOptions, None, reduceOp=op)
        options.asyncOp = True
        return self.allreduce([tensor], options, wires=wires(wire_dtype))

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work | None:
        """Reduces each element over the ranks; only the root's tensor changes."""
        options = as_options(ReduceOptions, opts, timeout, rootRank=opts if root is None else root, reduceOp=op)
        tensor = one_tensor(tensors, "reduce")
        return self._reduce(options, tensor, tensor, options.rootRank)

    def _reduce(self, options: Any, source: Tensor, output: Tensor, root: int) -> EngineWork | None:
        """Reduces the ranks' sources into the root's output, which may be its source; others' outputs stay."""
        code = _compute("reduce", source)
        memory = Memory()
        values = memory.input(reals(source, hash(options.reduceOp)))
        target = values
        # The engine writes the result at the root only.
        if root == self._rank:
            target = memory.output(output, load=False)
        how = self._reduction(options, code)
        where = whole(values, target)
        return self._run(options, _REDUCE, memory, [output], **where, root=root, **how, shape=source.shape)

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> dist.Work | None:
        """Reduces the ranks' lists element by element and leaves rank r with part r; the parts may differ in size."""
        options = as_options(ReduceScatterOptions, opts, timeout, reduceOp=opts if op is None else op)
        output = one_tensor(output_tensors, "reduce_scatter")
        inputs = tensor_list(input_tensors, "reduce_scatter")
        if len(inputs) != self._size or inputs[self._rank].numel() != output.numel():
            raise ValueError(
                f"reduce_scatter needs one input per rank, {self._size}, the own one as large as the output "
                f"({output.numel()} elements), got sizes {[t.numel() for t in inputs]}"
            )
        check_same_dtype("reduce_scatter", [output, *inputs])
        if any(tensor.numel() != output.numel() for tensor in inputs):
            # The reduces run one after the other, so an early output must not be a later input.
            own = (output.data_ptr(), output.data_ptr() + output.nbytes)
            for tensor in inputs[self._rank + 1 :]:  # which are read when the output is written
                if tensor.nbytes and tensor.data_ptr() < own[1] and own[0] < tensor.data_ptr() + tensor.nbytes:
                    raise ValueError(
                        "reduce_scatter: the output overlaps an input for another rank; give it a separate buffer"
                    )
            # The engine cuts equal parts. Parts of different sizes are a reduce for each rank.
            works = [self._reduce(options, tensor, output, root) for root, tensor in enumerate(inputs)]
            return JoinedWork(works, [output])
        memory = Memory()
        source = _one_behind_the_other(inputs, memory)
        return self._reduce_scatter(options, output, source, memory, one_shape([output, *inputs]))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work | None:
        """Reduces the ranks' tensors and leaves rank r with part r of the result."""
        options = as_options(ReduceScatterOptions, opts, reduceOp=opts)
        check_same_dtype("reduce_scatter", [output, input])
        check_elems("reduce_scatter", "the input", input.numel(), self._size * output.numel(), output)
        memory = Memory()
        return self._reduce_scatter(options, output, memory.input(input), memory, input.shape)

    _reduce_scatter_base = reduce_scatter_single  # its name before torch 2.13

    def _reduce_scatter(
        self, options: Any, output: Tensor, source: Tensor, memory: Memory, shape: torch.Size | None
    ) -> EngineWork | None:
        code = _compute("reduce_scatter", output)
        target = memory.output(reals(output, hash(options.reduceOp)), load=False)
        how = self._reduction(options, code)
        return self._run(options, _REDUCE_SCATTER, memory, [output], **whole(source, target), **how, shape=shape)

    def _reduction(self, options: Any, code: int, wires: Wires | None = None) -> Any:
        """Element type, the engine's reduction, this rank's factor of PREMUL_SUM, the type in which values travel."""
        reduction = REDUCTIONS[hash(options.reduceOp)]
        return {
            "dtype": code,
            "reduction": reduction,
            "factor": factor(options.reduceOp) if reduction == _PREMUL_SUM else 1.0,
            "wire_dtype": (self._wires if wires is None else wires).get((code, reduction)),
        }


def _compute(operation: str, tensor: Tensor) -> int:
    """The engine's code of the tensor's element type. Raises TypeError where there is none."""
    check_dense(tensor)
    code = _COMPUTED.get(tensor.dtype)
    if code is None:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in _COMPUTED)
        raise TypeError(
            f"{operation} can't compute with {tensor.dtype}; convert the tensor to one of {dtypes}. (Collectives that "
            f"only move data take any dtype.)"
        )
    return code


def _one_behind_the_other(tensors: Sequence[Tensor], memory: Memory) -> Tensor:
    """The tensors as one flat, dense one: their own memory where they lie so, else a copy."""
    parts = [memory.input(tensor).reshape(-1) for tensor in tensors]
    first = parts[0]
    # Lists are often the chunks of one tensor, and then nothing has to be copied.
    storage, nbytes = first.untyped_storage(), first.nbytes
    for i, part in enumerate(parts):
        if part.untyped_storage().data_ptr() != storage.data_ptr() or part.data_ptr() != first.data_ptr() + i * nbytes:
            return memory.input(torch.cat(parts))
    return first.as_strided((first.numel() * len(parts),), (1,))


def _sparse_all_reduce(group: EngineGroup, tensor: Tensor, options: Any) -> dist.Work | None:
    """Adds the ranks' sparse_coo tensors, which must have one shape, dtype and number of sparse dimensions.

    Every rank gathers all ranks' entries and adds them up in rank order. The ranks meet twice: for the numbers of
    entries, which differ, and for the entries. The first meeting is waited for here, asynchronous call or not.

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
    updates = group._updates.step_number()
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
        sends=[part_of(indices)] * size,
        recvs=[part_of(part) for part in torch.split(flat_indices, entries)],
        **group._place(memory),
    )
    first = group._submit(call, memory)

    def finish() -> None:
        # It has ended: the values went through the same lane behind it.
        first.wait()
        if memory.device is not None:
            first.order(torch_tools.streams.current(memory.device))
        with torch.inference_mode():
            # Entries lie in the order of the ranks, and equal indices are added in it: the same bits everywhere.
            total = torch.sparse_coo_tensor(all_indices.t(), all_values, shape, check_invariants=False).coalesce()
            tensor.copy_(total)
        if memory.device is not None:  # made here, on another stream than the caller waits on
            memory.add(tensor._indices(), tensor._values())

    memory.finally_ = finish
    return group._run(
        options,
        _ALL_GATHER,
        memory,
        [tensor],
        sends=[part_of(values)] * size,
        recvs=[part_of(part) for part in torch.split(flat_values, entries)],
        dtype=transfer_type(own.dtype)[0],
        label=label,
    )
