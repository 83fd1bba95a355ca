"""The process group of backend "photinus": torch's collectives through the engine, the rest through gloo.

One host: the engine does all_reduce, broadcast, all_gather, reduce_scatter and barrier for the dtypes and reductions
that it knows. Several hosts: everything goes through gloo, and rank 0 says so.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, Store

from .. import engine, env
from ..errors import AbortedError, WorldSizeError
from . import NAME, hosts, options, process_exit, profiling
from .alone import Alone
from .completer import Completer
from .inner_gloo import InnerGloo, Limit
from .outside_dynamo import outside_dynamo
from .tensors import DTYPES, REDUCTIONS, CopyBack, allocate, dense, reals
from .through_gloo import ThroughGloo
from .work import EngineWork, Handle

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions

__all__ = ["ProcessGroup"]

_log = logging.getLogger(__name__)

_ALL_REDUCE = engine.OPERATIONS["all_reduce"]
_BROADCAST = engine.OPERATIONS["broadcast"]
_ALL_GATHER = engine.OPERATIONS["all_gather"]
_REDUCE_SCATTER = engine.OPERATIONS["reduce_scatter"]
_BARRIER = engine.OPERATIONS["barrier"]
_OPERATION_NAMES = {code: name for name, code in engine.OPERATIONS.items()}

_REAL_OF = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_CODES = {**DTYPES, **{pair: DTYPES[real] for pair, real in _REAL_OF.items()}}  # of any dtype that the engine can take
_strided = torch.strided
_UNSET = options.UNSET

_JOINING_S = 60.0  # for the engine's rendezvous, after all ranks have shown themselves in the store
_RECENT_WORKS, _RECENT_BYTES = 256, 64 * 1024


@outside_dynamo
class ProcessGroup(ThroughGloo):
    """A c10d process group over the engine, made by `init_process_group("photinus")` and `new_group`.

    Args:
        communicator: the engine's; None where the ranks sit on several hosts.
        gloo, store, limit: see ThroughGloo.
        label: the group's name in messages.
    """

    def __init__(
        self,
        communicator: engine.Communicator | Alone | None,
        gloo: InnerGloo,
        store: Store,
        limit: Limit,
        label: str,
    ) -> None:
        super().__init__(gloo, store, limit, NAME)
        self._communicator = communicator
        self._label = label
        self._submit: Callable[..., Handle] | None = None if communicator is None else communicator.submit
        self._completer = Completer(label)
        # C++ may hold a work whose Python half nobody else holds (DDP's join does), and would then wait for ever in the
        # base class. Small ones only: what keeps a work keeps its tensors.
        self._recent: deque[EngineWork] = deque(maxlen=_RECENT_WORKS)
        process_exit.watch(self)

    @classmethod
    def from_options(cls, given: _DistributedBackendOptions) -> ProcessGroup:
        """Makes the group with all its ranks: finds the hosts, joins the engine's communicator and gloo.

        Raises:
            WorldSizeError: the default group is not as large as the launcher means.
            CollectiveTimeoutError: ranks are missing; names them.
        """
        rank, size, store = given.group_rank, given.group_size, given.store
        members = list(given.global_ranks_in_group)
        if not members:  # the default group
            _check_world_size(size)
        label = "world" if not members else f"{given.group_id} (ranks {_short(members)} of the world)"
        limit = Limit(_timeout_s(given.timeout))
        meeting = hosts.meet(store, rank, size, timeout_s=limit.timeout_s, name=label)
        communicator: engine.Communicator | Alone | None = None
        if size == 1:
            communicator = Alone()
        elif meeting.address is not None:
            joining_s = min(limit.timeout_s, _JOINING_S)
            communicator = engine.Communicator(rank, size, meeting.address, timeout_s=joining_s, name=label)
        elif rank == 0:
            _log.warning(
                "photinus: group %s spans several hosts, %s; its collectives go through gloo, without the engine",
                label,
                meeting.hosts(),
            )
        try:
            private = PrefixStore(f"photinus/{meeting.session}", store)
            gloo = InnerGloo(private, rank, size, limit, one_host=meeting.one_host)
            if rank == 0 and size > 1:
                hosts.tidy(store, meeting)
            return cls(communicator, gloo, store, limit, label)
        except BaseException:
            if communicator is not None:
                communicator.close()
            raise

    @property
    def uses_engine(self) -> bool:
        """Whether the engine serves this group; if not, its ranks sit on several hosts, or it was destroyed."""
        return self._communicator is not None

    # --- memory ----------------------------------------------------------------------------------------------------

    def allocate_tensor(
        self, size: int | Sequence[int], dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Tensor:
        """An uninitialised tensor in memory that all ranks of the host see, which the engine reduces where it lies.

        Args:
            size: number of elements, or a shape.
            dtype: torch's default dtype when None.
            device: the CPU; there is no other yet.
        """
        if device is not None and torch.device(device).type != "cpu":
            raise ValueError(f"allocate_tensor() of backend photinus makes CPU tensors, not ones on {device}")
        return allocate(size, dtype or torch.get_default_dtype())

    # --- collectives of the engine ---------------------------------------------------------------------------------

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> dist.Work:
        """Reduces each element over the ranks, in place."""
        given = opts if type(opts) is AllreduceOptions else options.all_reduce(opts if op is None else op, timeout)
        tensor = (
            tensors[0] if type(tensors) is list and len(tensors) == 1 else options.one_tensor(tensors, "all_reduce")
        )
        submit, reduction = self._submit, REDUCTIONS.get(hash(given.reduceOp))
        code = DTYPES.get(tensor.dtype)
        finish: CopyBack | None = None
        if (
            code is not None
            and tensor.is_cpu
            and tensor.layout is _strided
            and tensor.is_contiguous()
            and not tensor.is_neg()
        ):
            values = tensor
        else:
            code = _CODES.get(tensor.dtype)
            if code is None or tensor.layout is not _strided:
                return super().allreduce(tensor, given)
            finish = CopyBack()
            values = finish.output(reals(tensor, hash(given.reduceOp)), load=True)
        if submit is None or reduction is None:
            return super().allreduce(tensor, given)
        limit, address, asynchronous = given.timeout, values.data_ptr(), given.asyncOp
        event = profiling.begin("all_reduce")
        handle = submit(
            _ALL_REDUCE,
            address,
            address,
            values.numel(),
            code,
            reduction,
            0,
            self._limit.timeout_s if limit == _UNSET else limit.total_seconds(),
            asynchronous,
            values,
        )
        work = EngineWork(handle, [tensor], self._completer, finish or None)
        if event is not None:
            profiling.end_with(event, handle, self._completer)
        if asynchronous and tensor.nbytes <= _RECENT_BYTES:
            self._recent.append(work)
        return work

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> dist.Work:
        """Copies the root's tensor to all ranks' (opts.rootRank: rank in the group)."""
        given = options.broadcast(opts if root is None else root, timeout)
        tensor = options.one_tensor(tensors, "broadcast")
        code = _CODES.get(tensor.dtype)
        if self._submit is None or code is None:
            return super().broadcast(tensor, given)
        finish = CopyBack()
        values = finish.output(tensor, load=True)
        address = values.data_ptr()
        return self._run(
            given, _BROADCAST, address, address, values.numel(), code, 0, given.rootRank, values, [tensor], finish
        )

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Every rank's tensor in every rank's list, by rank."""
        given = options.all_gather(opts, timeout)
        outputs = options.tensor_list(output_tensors, "all_gather")
        tensor = options.one_tensor(input_tensors, "all_gather")
        if self._submit is None or tensor.dtype not in _CODES:
            return super().allgather([outputs], [tensor], given)
        if len(outputs) != self._size:
            raise ValueError(f"all_gather needs one output per rank, {self._size}, got {len(outputs)}")
        _check_same_dtype("all_gather", outputs[0], tensor)
        _check_elems("all_gather", "each output", outputs[0].numel(), tensor.numel(), tensor)
        finish = CopyBack()
        return self._all_gather(given, finish.parts(outputs), tensor, outputs, finish)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Every rank's tensor in one tensor, by rank."""
        given = options.all_gather(opts)
        if self._submit is None or input.dtype not in _CODES:
            return super().all_gather_single(output, input, given)
        _check_same_dtype("all_gather", output, input)
        _check_elems("all_gather", "the output", output.numel(), self._size * input.numel(), input)
        finish = CopyBack()
        return self._all_gather(given, finish.output(output, load=False), input, [output], finish)

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> dist.Work:
        """Reduces the ranks' lists element by element and leaves rank r with part r."""
        output = options.one_tensor(output_tensors, "reduce_scatter")
        inputs = options.tensor_list(input_tensors, "reduce_scatter")
        if len(inputs) != self._size or any(t.numel() != output.numel() for t in inputs):
            raise ValueError(
                f"reduce_scatter needs one input per rank, {self._size}, each as large as the output "
                f"({output.numel()} elements), got sizes {[t.numel() for t in inputs]}"
            )
        return super().reduce_scatter(output, inputs, opts, timeout, op=op)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Reduces the ranks' tensors and leaves rank r with part r of the result."""
        given = options.reduce_scatter(opts)
        code, reduction = _CODES.get(output.dtype), REDUCTIONS.get(hash(given.reduceOp))
        if self._submit is None or code is None or reduction is None:
            return super().reduce_scatter_single(output, input, given)
        _check_same_dtype("reduce_scatter", output, input)
        _check_elems("reduce_scatter", "the input", input.numel(), self._size * output.numel(), output)
        finish = CopyBack()
        target = finish.output(reals(output, hash(given.reduceOp)), load=False)
        source = dense(input)
        return self._run(
            given,
            _REDUCE_SCATTER,
            source.data_ptr(),
            target.data_ptr(),
            target.numel(),
            code,
            reduction,
            0,
            (source, target),
            [output],
            finish,
        )

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Done when every rank has called it, and so has ended what it waited for before."""
        given = options.barrier(opts, timeout)
        if self._submit is None:
            return super().barrier(given)
        return self._run(given, _BARRIER, 0, 0, 0, 0, 0, 0, None, [], CopyBack())

    # Names of torch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def _all_gather(
        self, given: Any, target: Tensor, tensor: Tensor, outputs: list[Tensor], finish: CopyBack
    ) -> dist.Work:
        source = dense(tensor)
        return self._run(
            given,
            _ALL_GATHER,
            source.data_ptr(),
            target.data_ptr(),
            source.numel(),
            DTYPES[source.dtype],
            0,
            0,
            (source, target),
            outputs,
            finish,
        )

    def _run(
        self,
        given: Any,
        operation: int,
        send_address: int,
        recv_address: int,
        elems: int,
        code: int,
        reduction: int,
        root: int,
        keep: object,
        outputs: list[Tensor],
        finish: CopyBack,
    ) -> EngineWork:
        assert self._submit is not None
        limit, asynchronous = given.timeout, given.asyncOp
        timeout_s = self._limit.timeout_s if limit == _UNSET else limit.total_seconds()
        event = profiling.begin(_OPERATION_NAMES[operation])
        handle = self._submit(
            operation, send_address, recv_address, elems, code, reduction, root, timeout_s, asynchronous, keep
        )
        work = EngineWork(handle, outputs, self._completer, finish or None)
        if event is not None:
            profiling.end_with(event, handle, self._completer)
        if asynchronous and sum(t.nbytes for t in outputs) <= _RECENT_BYTES:
            self._recent.append(work)
        return work

    # --- the end ---------------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        """Tells the peers that this rank will not come any more, and why ("rank 1 (pid, host) ... <reason>")."""
        if self._communicator is not None:
            self._communicator.set_reason(reason)
            self._communicator.abort(reason)

    def abort(self) -> None:
        """Ends what is in flight here and on the peers with AbortedError and refuses everything later."""
        if self._communicator is not None:
            self._communicator.abort(f"rank {self._rank} of group {self._label} aborted the group")
        self._end(f"process group {self._label} was aborted")

    def shutdown(self) -> None:
        """Leaves the group in order; `destroy_process_group` calls it. Idempotent."""
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None
        self._completer.close()
        self._recent.clear()
        self._end(f"process group {self._label} was destroyed")
        process_exit.forget(self)

    def _end(self, reason: str) -> None:
        def refuse(*_: object) -> Handle:
            raise AbortedError(reason)

        if self._submit is not None:
            self._submit = refuse
        self._gloo = _Ended(reason)  # type: ignore[assignment]


class _Ended:
    """In the place of the inner gloo of a group that has ended: any use raises AbortedError."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise AbortedError(self._reason)


def _check_world_size(size: int) -> None:
    meant = env.EXPECTED_WORLD_SIZE.get()
    if meant is not None and meant != size:
        raise WorldSizeError(
            f"the default process group has {size} rank{'s' if size > 1 else ''}, but the launcher means {meant} "
            f"({env.EXPECTED_WORLD_SIZE.name}={meant}): each process would train for itself, or wait for ranks that do "
            f"not exist. Leave rank and world_size to init_process_group, or start the script with "
            f"`photinus run --nproc-per-node {size}`."
        )


def _timeout_s(given: timedelta) -> float:
    """torch's default of half an hour gives way to PHOTINUS_TIMEOUT_S; any other timeout was somebody's wish."""
    if given == dist.default_pg_timeout and os.environ.get(env.TIMEOUT_S.name):
        return env.TIMEOUT_S.get()
    return given.total_seconds()


def _check_same_dtype(operation: str, output: Tensor, input: Tensor) -> None:
    if output.dtype != input.dtype:
        raise ValueError(f"{operation} needs input and output of one dtype, got {input.dtype} and {output.dtype}")


def _check_elems(operation: str, what: str, got: int, needed: int, of: Tensor) -> None:
    if got != needed:
        raise ValueError(
            f"{operation} needs {needed} elements in {what} for a tensor of shape {tuple(of.shape)} per rank, got {got}"
        )


def _short(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown}, ... {len(ranks)} in all"
