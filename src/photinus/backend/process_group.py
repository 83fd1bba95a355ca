"""The face of a photinus process group towards torch: who it is, its memory, several collectives at once.

`ThroughEngine` fills it in, and `ByDevice` for groups that serve several kinds of devices.

torch calls a group's methods in three ways: C++ through a trampoline class (allreduce, broadcast, allgather,
reduce_scatter, all_to_all_single, barrier, send, recv and their coalesced forms), dist.* as plain attributes, and
libraries in the bindings' overloaded forms (`options`). A method that C++ can call must be defined in Python even where
it only forwards: without an override, torch runs its own one with the GIL held, and that deadlocks against gloo's
threads.

What a process with open groups leaves behind:
- An uncaught exception aborts the groups at once, with a reason that the peers read ("rank 1 ... raised ValueError:
  ..."), even where the process then takes long to end.
- At interpreter exit the groups that nobody destroyed are shut down: a thread left in native code would end the process
  with SIGABRT ("terminate called without an active exception"). Daemon threads that wait in a collective stay there.
- A forked child (a data loader's worker) lets its parent's groups alone: it shares their sockets, and gloo's destructor
  would wait for threads that the child does not have.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    PrefixStore,
    ReduceScatterOptions,
    Store,
    _DistributedBackendOptions,
)

from .. import _native, engine
from ..errors import AbortedError, CollectiveError, HostError, PhotinusError
from .arguments import allocate, as_options, each_all_reduce
from .name import NAME
from .torch_tools import outside_dynamo
from .work import JoinedWork

_TorchProcessGroup: Any = dist.ProcessGroup  # its stubs' overloads exclude each other; one method here takes them all

_Maker: TypeAlias = "Callable[[_DistributedBackendOptions, Sequence[torch.device] | None], ProcessGroup]"
"""Makes a group that torch describes, for some device types (None: for all)."""


class GroupParts(NamedTuple):
    """The way to make parts of a group.

    Attributes:
        make: makes one.
        members: ranks of the world in the group; empty: all.
    """

    make: _Maker
    members: Sequence[int]


class Limit:
    """The timeout in seconds of operations for which the caller gave none; shared by a group and its inner gloo."""

    def __init__(self, timeout_s: float) -> None:
        # Shared, so that a change by either is seen by both.
        self.timeout_s = timeout_s


class InnerGloo(dist.ProcessGroupGloo):
    """The gloo backend inside each group, with the methods that torch, also its C++, calls on a backend directly.

    torch's `Backend` cannot be subclassed in Python, `ProcessGroupGloo` can; so the questions that torch puts to
    `group._get_backend(device)` (timeout, memory for FSDP2's buffers) are answered here for the whole group. The ranks
    connect when they first exchange something over it, which few programs ever make them do.

    Args:
        store: with a prefix that no earlier group used, since gloo takes any address that it finds there.
        address: of this rank's host, in digits, at which the others reach it. (gloo's own choice is that of the host's
            name, which is often 127.0.1.1, or none.)
    """

    def __init__(self, store: Store, rank: int, size: int, limit: Limit, address: str) -> None:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=True)]
        except RuntimeError as error:
            raise HostError(
                f"cannot listen on {address}: no network interface of this host has this address: "
                f"{error}. `ip addr` shows them; `ip link set lo up` brings 127.0.0.1 back."
            ) from None
        options._threads = 2
        options._timeout = timedelta(seconds=limit.timeout_s)
        super().__init__(store, rank, size, options)
        self._limit = limit

    if TYPE_CHECKING:  # torch's stubs leave the collectives of a backend out

        def __getattr__(self, name: str) -> Callable[..., dist.Work]: ...

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later operations, gloo's and the engine's."""
        super()._set_default_timeout(timeout)
        self._limit.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout  # which dist.distributed_c10d._set_pg_timeout calls

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether `allocate_tensor` works for the device."""
        # The arena is memory of the host.
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """Return an uninitialized tensor of `size` elements in the arena; FSDP2 can take its buffers from here."""
        return allocate(size, dtype)


@outside_dynamo
class ProcessGroup(_TorchProcessGroup):  # type: ignore[misc]
    """See the module.

    Args:
        gloo: the inner gloo of this group: torch asks it what the group's backend can do, and C++ code that goes past
            the group's methods reaches it.
        store: of this group.
        limit: timeout of operations for which the caller gives none.
        label: the group's name in messages.
        devices: the types that torch is told of.
        parts: the way to make parts of this group.
    """

    def __init__(
        self,
        gloo: InnerGloo,
        store: Store,
        limit: Limit,
        label: str,
        devices: Sequence[torch.device],
        parts: GroupParts,
    ) -> None:
        # torch 2.13's three-argument form does not take a subclass ("not an alias instance").
        super().__init__(gloo.rank(), gloo.size())
        self._gloo = gloo
        self._rank, self._size = gloo.rank(), gloo.size()
        self._store = store
        self._limit = limit
        self._label = label
        self._name = self._description = ""
        self._together: list[dist.Work] | None = None
        self._parts = parts
        self._splits: dict[tuple[int, ...], int] = {}
        for device in devices:
            # torch asks this one, and not the group, for timeouts and memory.
            self._register_backend(device, dist.ProcessGroup.BackendType.CUSTOM, gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        _prepare_exit()
        _open.add(self)

    @property
    def communicator(self) -> engine.Communicator | None:
        """The engine's; None when the group was destroyed."""
        return None

    @property
    def timeout_s(self) -> float:
        """Of operations that are given none."""
        return self._limit.timeout_s

    # --- who we are ------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        """The backend's name."""
        return NAME

    def getRank(self) -> int:  # noqa: N802
        """This rank in the group."""
        return self._rank

    def getSize(self) -> int:  # noqa: N802
        """The number of ranks."""
        return self._size

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Called once by torch."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """torch's name of the group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Called once by torch."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """torch's description of the group."""
        return self._description

    def get_group_store(self) -> Store:
        """The store that the group was made with."""
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        self._gloo._set_sequence_number_for_group()

    def _get_sequence_number_for_group(self) -> int:
        number: Any = self._gloo._get_sequence_number_for_group()
        return int(number)

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later operations that are given none."""
        self._gloo.set_timeout(timeout)

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

    labelled = staticmethod(engine.label)

    # --- several at once ---------------------------------------------------------------------------------------------

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """all_reduce of several tensors, which may differ in shape and dtype, as one work."""
        options = each_all_reduce(opts)
        return JoinedWork([self.allreduce([tensor], options) for tensor in tensors], tensors)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """all_gather_single of several pairs as one work."""
        options = as_options(AllgatherOptions, opts)
        pairs = zip(outputs, inputs, strict=True)
        return JoinedWork([self.all_gather_single(output, input, options) for output, input in pairs], outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """reduce_scatter_single of several pairs as one work."""
        options = as_options(ReduceScatterOptions, opts, reduceOp=opts)
        pairs = zip(outputs, inputs, strict=True)
        return JoinedWork([self.reduce_scatter_single(output, input, options) for output, input in pairs], outputs)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], input_list: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """all_gather of several tensors as one work; output_lists[rank][tensor]."""
        options = as_options(AllgatherOptions, opts)
        works = [
            self.allgather([[of_rank[i] for of_rank in output_lists]], [tensor], options)
            for i, tensor in enumerate(input_list)
        ]
        return JoinedWork(works, [tensor for of_rank in output_lists for tensor in of_rank])

    # Names of torch before 2.13.
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        """The works started from here on, by this thread or others, become one work in `_end_coalescing`.

        `_coalescing_manager(device=...)` calls it. Where a backend refuses, torch 2.13 is left in a state in which it
        swallows every later all_reduce of the group.
        """
        # In one list, the works of two callers would look alike.
        if self._together is not None:
            raise PhotinusError(f"process group {self._label} is already coalescing; end that first")
        works: list[dist.Work] = []
        for name in _STARTING:
            # On the object, so that calls cost nothing more while nobody coalesces, and `delattr` ends it.
            setattr(self, name, _record_works(getattr(self, name), works))
        self._together = works

    def _end_coalescing(self, device: torch.device | None = None) -> dist.Work:
        """One work for all that were started since `_start_coalescing`."""
        if self._together is None:
            raise PhotinusError(f"process group {self._label} is not coalescing; call _start_coalescing() first")
        works, self._together = self._together, None
        for name in _STARTING:
            delattr(self, name)
        return JoinedWork(works, [output for work in works for output in work.result()])

    # --- parts of the group ------------------------------------------------------------------------------------------

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: Any = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> ProcessGroup | None:
        """A group of some of this group's ranks; all ranks of the parts that this group is split into call it at once.

        Args:
            ranks: of the new group, as ranks in this one.
            timeout: of the new group; default: this one's.
            opts: ignored; the other devices' backends get those of this group.
            group_name, group_desc: default: made from this one's and the ranks.
            device_types: whose backends the new group gets, default all; the CPU is served in any case.

        Returns:
            The new group, or None on a rank that is not in it.
        """
        members = list(ranks)
        if len(set(members)) != len(members) or not all(0 <= rank < self._size for rank in members):
            raise ValueError(f"split_group needs different ranks below {self._size}, got {members}")
        # Unlike in new_group, ranks outside have no part to play.
        if self._rank not in members:
            return None
        # The same part may be split off again, and must not find the keys of the first one.
        self._splits[tuple(members)] = turn = self._splits.get(tuple(members), 0) + 1
        name = group_name or f"{self._name or 'group'}:split:{'-'.join(map(str, members))}:{turn}"
        backend_options = _DistributedBackendOptions()
        backend_options.store = PrefixStore(f"{name}/", self._store)
        backend_options.group_rank, backend_options.group_size = members.index(self._rank), len(members)
        backend_options.timeout = timeout if timeout is not None else timedelta(seconds=self._limit.timeout_s)
        backend_options.group_id = name
        # In numbers of the world, by which messages and the store name ranks.
        backend_options.global_ranks_in_group = [(self._parts.members or range(self._size))[rank] for rank in members]
        part = self._parts.make(backend_options, device_types)
        # torch does this for groups of its own making only.
        part.setGroupName(name)
        part.setGroupDesc(group_desc or f"{self._description or self._label}:split")
        return part

    # --- the end ---------------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        """Tells the peers that this rank will not come any more, and why ("rank 1 (pid, host) ... <reason>")."""

    def abort(self) -> None:
        """Ends what is in flight here and on the peers with AbortedError and refuses everything later."""
        self._end(f"process group {self._label} was aborted")

    def shutdown(self) -> None:
        """Leaves the group in order; `destroy_process_group` calls it. Idempotent."""
        self._end(f"process group {self._label} was destroyed")
        _open.discard(self)

    def _end(self, reason: str) -> None:
        self._gloo = _Ended(reason)  # type: ignore[assignment]


_STARTING = [  # a work
    *("allreduce", "broadcast", "reduce", "barrier", "send", "recv", "recv_anysource"),
    *("allgather", "all_gather_single", "gather", "scatter", "alltoall", "all_to_all_single"),
    *("reduce_scatter", "reduce_scatter_single"),
    *("allreduce_coalesced", "all_gather_single_coalesced", "reduce_scatter_single_coalesced", "allgather_coalesced"),
]


def _record_works(start: Callable[..., dist.Work], works: list[dist.Work]) -> Callable[..., dist.Work]:
    def method(*args: Any, **kwargs: Any) -> dist.Work:
        work = start(*args, **kwargs)
        if work is not None:
            works.append(work)
        return work

    return method


class _Ended:
    """In the place of the inner gloo of a group that has ended: any use raises AbortedError."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise AbortedError(self._reason)


# Weak, or no group would ever be collected.
_open: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


@cache
def _prepare_exit() -> None:
    """Sets up, once, what this process does with open groups when it ends or forks."""
    atexit.register(_shut_down_all)
    os.register_at_fork(after_in_child=_leave_to_parent)
    _chain_excepthook()


def _chain_excepthook() -> None:
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        # At a prompt the process goes on. A collective's error is known to the peers, with its cause.
        if not hasattr(sys, "ps1") and not isinstance(error, CollectiveError):
            lines = str(error).splitlines()
            for group in list(_open):
                group.fail(f"raised {kind.__name__}: {lines[0]}" if lines else f"raised {kind.__name__}")
        # The peers first: printing may block, and they wait for this rank.
        previous(kind, error, traceback)

    sys.excepthook = excepthook


def _shut_down_all() -> None:
    # Threads that are in native code now must not come back into an interpreter that is gone.
    _native.begin_exit()
    for group in list(_open):
        # At exit nobody can catch an error any more.
        with engine.printed():
            group.shutdown()


def _leave_to_parent() -> None:
    for group in list(_open):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # never destroyed, not even at the interpreter's end
    _open.clear()
