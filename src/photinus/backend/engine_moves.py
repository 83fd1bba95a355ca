"""Collectives and messages that compute nothing: the engine moves elements of any dtype.

The data from one rank to another may differ in size from pair to pair; the engine compares both sides' sizes before
anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
)

from .. import engine
from ..engine import Call
from ..errors import CollectiveTimeoutError, PeerLostError
from .arguments import Memory, as_options, one_tensor, tensor_list, transfer_type
from .engine_group import EngineGroup, Part, check_elems, check_same_dtype, one_shape, whole
from .torch_tools import begin_event, end_event, outside_dynamo
from .updates import parameters_of_new_ddp
from .work import CudaWork, EngineWork

_BROADCAST = engine.OPERATIONS["broadcast"]
_ALL_GATHER = engine.OPERATIONS["all_gather"]
_GATHER = engine.OPERATIONS["gather"]
_SCATTER = engine.OPERATIONS["scatter"]
_ALL_TO_ALL = engine.OPERATIONS["all_to_all"]
_BARRIER = engine.OPERATIONS["barrier"]
_SEND = engine.OPERATIONS["send"]
_RECV = engine.OPERATIONS["recv"]
_NOTHING: Part = (0, 0)
_NO_MEMORY = Memory()
_SHORTEST_S = 1e-3  # a timeout of 0 means this one in torch, the group's own in the engine
# The engine of another rank sends its error as text, so the ranks are read from that.
_WAITED_FOR = re.compile(r" s for ranks? (\d+(?:, \d+)*), which ")


@outside_dynamo
class EngineMoves(EngineGroup):
    """See the module. Wrong arguments raise ValueError or TypeError before anything is exchanged."""

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> dist.Work | None:
        """Copies the root's tensor to all ranks' (opts.rootRank: rank in the group)."""
        options = as_options(BroadcastOptions, opts, timeout, rootRank=opts if root is None else root)
        tensor = one_tensor(tensors, "broadcast")
        code, label = transfer_type(tensor.dtype)
        memory = Memory()
        # Only the root is read; for all others the copy in would be wasted.
        values = memory.output(tensor, load=options.rootRank == self._rank)
        where = {**whole(values, values), "shape": tensor.shape}
        return self._run(options, _BROADCAST, memory, [tensor], **where, dtype=code, root=options.rootRank, label=label)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work | None:
        """Every rank's tensor in one tensor, by rank."""
        options = as_options(AllgatherOptions, opts)
        check_same_dtype("all_gather", [output, input])
        check_elems("all_gather", "the output", output.numel(), self._size * input.numel(), input)
        code, label = transfer_type(input.dtype)
        memory = Memory()
        target, source = memory.output(output, load=False), memory.input(input)
        where = {**whole(source, target), "shape": input.shape}
        return self._run(options, _ALL_GATHER, memory, [output], **where, dtype=code, label=label)

    _allgather_base = all_gather_single  # its name before torch 2.13

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work | None:
        """Every rank's tensor in every rank's list, by rank; they may differ in size."""
        # torch's DDP tells a backend nothing, but compares its parameters' shapes by this call.
        if parameters := parameters_of_new_ddp():
            self._updates.watch(parameters)
        options = as_options(AllgatherOptions, opts, timeout)
        outputs = tensor_list(output_tensors, "all_gather")
        tensor = one_tensor(input_tensors, "all_gather")
        self._one_per_rank("all_gather", "output", outputs)
        check_elems("all_gather", "this rank's own output", outputs[self._rank].numel(), tensor.numel(), tensor)
        return self._move(options, _ALL_GATHER, "all_gather", [tensor] * self._size, outputs)

    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work | None:
        """Every rank's tensor in the root's list, by rank; they may differ in size."""
        options = as_options(GatherOptions, opts, timeout, rootRank=opts if root is None else root)
        inputs: list[Tensor | None] = [None] * self._size
        inputs[self._root("gather", options)] = one_tensor(input_tensors, "gather")
        # Only the root has a list. torch passes None or an empty one on the other ranks.
        outputs: list[Tensor] = []
        if options.rootRank == self._rank:
            outputs = tensor_list(output_tensors, "gather")
            self._one_per_rank("gather", "output", outputs)
        return self._move(options, _GATHER, "gather", inputs, outputs, root=options.rootRank)

    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work | None:
        """Part r of the root's list in rank r's tensor; they may differ in size."""
        options = as_options(ScatterOptions, opts, timeout, rootRank=opts if root is None else root)
        outputs: list[Tensor | None] = [None] * self._size
        outputs[self._root("scatter", options)] = one_tensor(output_tensors, "scatter")
        inputs: list[Tensor] = []
        if options.rootRank == self._rank:
            inputs = tensor_list(input_tensors, "scatter")
            self._one_per_rank("scatter", "input", inputs)
        return self._move(options, _SCATTER, "scatter", inputs, outputs, root=options.rootRank)

    def alltoall(
        self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], opts: Any = None
    ) -> dist.Work | None:
        """Sends tensor r of the inputs to rank r; output r comes from rank r. Sizes may differ."""
        self._one_per_rank("all_to_all", "output", output_tensors)
        self._one_per_rank("all_to_all", "input", input_tensors)
        options = as_options(AllToAllOptions, opts)
        return self._move(options, _ALL_TO_ALL, "all_to_all", input_tensors, output_tensors)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work | None:
        """Sends part r of the input to rank r; the output's parts come from the ranks. No sizes: equal parts.

        Sizes count rows, entries of the first dimension.
        """
        options = as_options(AllToAllOptions, opts, timeout)
        check_same_dtype("all_to_all_single", [output, input])
        code, label = transfer_type(input.dtype)
        memory = Memory()
        target, source = memory.output(output, load=False), memory.input(input)
        recvs = self._rows("output", target, output, output_split_sizes)
        sends = self._rows("input", source, input, input_split_sizes)
        # With sizes of their own the ranks' shapes differ by design, and are not compared.
        shape = None if output_split_sizes or input_split_sizes else one_shape([output, input])
        parts = {"sends": sends, "recvs": recvs, "shape": shape}
        return self._run(options, _ALL_TO_ALL, memory, [output], **parts, dtype=code, label=label)

    alltoall_base = all_to_all_single  # its name before torch 2.13

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work | None:
        """Done when every rank has called it, and so has ended what it waited for before."""
        return self._run(as_options(BarrierOptions, opts, timeout), _BARRIER, _NO_MEMORY, [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that waits here. The error names all ranks that did not come; it begins as gloo's does.

        Raises:
            CollectiveTimeoutError: ranks are missing. The group is unusable afterwards.
            PeerLostError: a rank died, or left because others are missing.
        """
        # Shortest, because 0 has two meanings (see above).
        limit_s = self._limit.timeout_s if timeout is None else max(timeout.total_seconds(), _SHORTEST_S)
        try:
            self._do(Call(_BARRIER, timeout_s=limit_s, label="monitored_barrier", updates=self._updates.step_number()))
        except (CollectiveTimeoutError, PeerLostError) as error:
            # Also from the error of a rank that gave up first: each rank should name those who really are missing.
            missing = missing_ranks(str(error))
            if self._rank == 0 and not missing:
                raise  # a rank died; the engine names it
            # Whoever's time is over first ends the wait of the others: a timeout to all.
            kind = CollectiveTimeoutError if missing else PeerLostError
            raise kind(monitored_text(self._rank, limit_s, wait_all_ranks, missing, str(error))) from error

    # --- messages, in order for each peer and tag; both ranks must name the same size and element type ---------------

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Sends a tensor to a rank of the group; done when that rank has it."""
        tensor = one_tensor(tensors, "send")
        memory = Memory()
        return self._run_message("send", _SEND, memory.input(tensor), dstRank, tag, tensor, memory)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Receives a tensor from a rank of the group."""
        return self._receive("recv", tensors, srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Receives a tensor from whichever rank sends first; the work's source_rank() tells which."""
        return self._receive("recvAnySource", tensors, engine.ANY_RANK, tag)

    def _receive(self, event_name: str, tensors: Any, peer: int, tag: int) -> dist.Work:
        tensor, memory = one_tensor(tensors, "recv"), Memory()
        return self._run_message(event_name, _RECV, memory.output(tensor, load=False), peer, tag, tensor, memory)

    def _run_message(
        self, event_name: str, operation: int, values: Tensor, peer: int, tag: int, output: Tensor, memory: Memory,
    ) -> EngineWork:  # fmt: skip
        """Starts a send or recv. torch waits on the works, or, with isend and irecv, its user does."""
        code, kind = transfer_type(output.dtype)
        event = begin_event(event_name)
        try:
            handle = self._message(
                operation, values.data_ptr(), values.numel(), code, peer, tag, self._limit.timeout_s, True, memory,
                kind, **self._place(memory),
            )  # fmt: skip
        except BaseException:
            end_event(event)
            raise
        work_type = EngineWork if memory.device is None else CudaWork
        work = work_type(handle, [output], self._completer.submit, memory)
        if event is not None:
            work.end_event_when_done(event)
        self._do = self._do_and_look
        self._raise_lost()
        return work

    def _move(
        self,
        options: Any,
        operation: int,
        name: str,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[Tensor | None],
        *,
        root: int = 0,
    ) -> EngineWork | None:
        """Sends inputs[r] to rank r and receives outputs[r] from it; None or an empty list where nothing goes."""
        given_outputs = [tensor for tensor in outputs if tensor is not None]
        tensors = [*given_outputs, *(tensor for tensor in inputs if tensor is not None)]
        check_same_dtype(name, tensors)
        code, label = transfer_type(tensors[0].dtype)
        memory = Memory()
        nothing: list[Tensor | None] = [None] * self._size
        # One input for all ranks (all_gather) is made dense once.
        # By id, since == of tensors compares their elements.
        dense_of = {id(tensor): memory.input(tensor) for tensor in inputs if tensor is not None}
        sources = [None if tensor is None else dense_of[id(tensor)] for tensor in inputs] or nothing
        targets = [None if tensor is None else memory.output(tensor, load=False) for tensor in outputs] or nothing
        return self._run(
            options,
            operation,
            memory,
            given_outputs,
            sends=[part_of(tensor) for tensor in sources],
            recvs=[part_of(tensor) for tensor in targets],
            dtype=code,
            root=root,
            label=label,
            # Where sizes differ there is no one shape; the engine then compares sizes pair by pair.
            shape=one_shape(tensors),
        )

    def _rows(self, what: str, values: Tensor, of: Tensor, sizes: Sequence[int]) -> list[Part]:
        """The parts of a tensor (`values` is its dense form) for each rank."""
        rows = of.size(0) if of.dim() else 0
        if not sizes:
            if rows % self._size or not of.dim():
                raise ValueError(
                    f"all_to_all_single needs a first dimension that the {self._size} ranks divide evenly, or split "
                    f"sizes, got {what} of shape {tuple(of.shape)}"
                )
            # As torch does: no sizes mean equal parts.
            sizes = [rows // self._size] * self._size
        if len(sizes) != self._size or sum(sizes) != rows or min(sizes) < 0:
            raise ValueError(
                f"all_to_all_single needs {self._size} {what} split sizes, one per rank, which add up to {rows} rows, "
                f"got {list(sizes)}"
            )
        # Of the dense form, where a complex number has two elements.
        row_elems = values.numel() // rows if rows else 0
        row_bytes = row_elems * values.element_size()
        parts, start = [], values.data_ptr()
        for size in sizes:
            parts.append((start, size * row_elems) if size * row_elems else _NOTHING)
            start += size * row_bytes
        return parts

    def _one_per_rank(self, operation: str, what: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self._size:
            raise ValueError(f"{operation} needs one {what} per rank, {self._size}, got {len(tensors)}")

    def _root(self, operation: str, options: Any) -> int:
        root: int = options.rootRank
        if not 0 <= root < self._size:
            raise ValueError(f"{operation}: root {root} is not a rank of this group of {self._size}")
        return root


def part_of(values: Tensor | None) -> Part:
    """Return the address of a dense tensor, and its number of elements (a complex one counts as two)."""
    return _NOTHING if values is None else (values.data_ptr(), values.numel())


def missing_ranks(error: str) -> list[int]:
    """Whom the engine's error, of this rank or of one that gave up before it, says to have been waited for in vain."""
    found = _WAITED_FOR.search(error)
    return [int(number) for number in found.group(1).split(", ")] if found else []


def monitored_text(rank: int, timeout_s: float, wait_all_ranks: bool, missing: Sequence[int], error: str) -> str:
    """The error's text for one rank.

    Rank 0 names who is missing: the first rank, or all of them with `wait_all_ranks`, as gloo does; our own words,
    which follow, name all in any case. Another rank blames rank 0 if that is missing, else says that it came itself.
    """
    timed_out = f"Rank {rank} timed out in monitoredBarrier: {error}"
    if rank == 0 and missing:
        ranks = missing if wait_all_ranks else missing[:1]
        who = f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        # gloo says one of the two: the first if it was waiting for that rank, the second between two ranks.
        return f"{who} failed to pass monitoredBarrier in {timeout_s * 1000:.0f} ms, so {timed_out}"
    if 0 in missing or rank == 0:
        return timed_out
    return (
        f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank "
        f"0. Please check rank 0 logs for faulty rank: {error}"
    )
