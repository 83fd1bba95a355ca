"""The engine's Python face: collectives among processes, in shared memory and between hosts. Needs no torch.

    address = engine.new_address()                    # in one process; bring it to the others by any means
    with engine.Communicator(rank, world_size, address) as communicator:
        communicator.all_reduce(array, "avg")         # numpy arrays, or anything with the array interface

Arrays made over `allocate` lie in shared memory and are reduced where they lie; others go through slots, chunk by
chunk. The order of addition is fixed, so every run gives the same bits on every rank.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, NamedTuple

from . import _native, env
from ._native import Call, CudaDevice, OutsideWait, Work
from .errors import CollectiveError, HostError
from .job.own_address import reaches_from

__all__ = [
    "ANY_RANK",
    "DTYPES",
    "OPERATIONS",
    "REDUCTIONS",
    "Call",
    "Communicator",
    "CudaDevice",
    "Part",
    "Place",
    "Work",
    "allocate",
    "call_site",
    "cuda_device",
    "explain",
    "host_id",
    "label",
    "listen",
    "network_id",
    "new_address",
    "pass_over_frames_of",
]


DTYPES: dict[str, int] = _native.DTYPES
"""Element types by name, as the engine numbers them."""

_BY_TYPESTR = {
    "f4": "float32",
    "f8": "float64",
    "f2": "float16",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "u1": "uint8",
    "b1": "bool",
}


def facts(array: Any, *, writable: bool) -> tuple[int, int, int, tuple[int, ...]]:
    """Address, number of elements, element type and shape of a C-contiguous array."""
    interface = getattr(array, "__array_interface__", None)
    if interface is None:
        raise TypeError(f"needs a numpy array (or another object with __array_interface__), not {type(array).__name__}")
    name = _BY_TYPESTR.get(interface["typestr"][1:])
    if str(getattr(array, "dtype", "")) == "bfloat16":  # ml_dtypes' arrays call themselves void
        name = "bfloat16"
    if name is None or interface["typestr"][0] == ">":
        dtype = getattr(array, "dtype", interface["typestr"])
        raise TypeError(f"element type {dtype} is not one of {', '.join(DTYPES)}")
    if interface.get("strides") is not None:
        raise ValueError("needs a C-contiguous array; make one with numpy.ascontiguousarray")
    place = interface.get("data")  # the protocol also has arrays that tell it by a buffer
    if not isinstance(place, tuple):
        raise TypeError(f"a {type(array).__name__} has no address; make an array with numpy.asarray")
    address, read_only = place
    if writable and read_only:
        raise ValueError("the array is read-only, but the result goes into it")
    shape = tuple(interface["shape"])  # some objects have a list
    return address, math.prod(shape), DTYPES[name], shape


REDUCTIONS: dict[str, int] = _native.REDUCTIONS
"""Reductions by name. "avg" divides the sum by the number of ranks; on integers it truncates towards zero.
"premul_sum" multiplies each rank's values by that rank's own factor first (floating types). "band", "bor" and "bxor"
are bitwise (integers and bool)."""
OPERATIONS: dict[str, int] = _native.OPERATIONS
"""Collectives by name."""

ANY_RANK = -1
"""For `recv`: from whichever rank sends first."""

Part = tuple[int, int]
"""Memory that one rank sends or receives: its address, and the number of elements."""


class Place(NamedTuple):
    """The place of a rank, in a group over several hosts.

    Attributes:
        host_key: equal for ranks that share memory (`engine.host_id`).
        host_name, pid: shown in messages.
        links: addresses where ranks of other hosts reach it: what `engine.listen` returned there.
    """

    host_key: str
    host_name: str
    pid: int
    links: list[str]


def pass_over_frames_of(paths: Sequence[str]) -> None:
    """Set which libraries lie between the user's program and the engine; replaces an earlier list.

    Messages quote the innermost line of the program outside of these. Photinus itself always counts as one. They name
    the function of its trainer that this line called.

    Args:
        paths: files, or folders that end with a slash.
    """
    _native.set_library_folders([(own := os.path.dirname(os.path.abspath(__file__)) + "/"), *paths], own + "trainer/")


pass_over_frames_of([])

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NETWORK = "/proc/self/ns/net"


def new_address(at: Sequence[str] = ()) -> str:
    """Create the address of one group: printable text with the name of an abstract Unix socket and a 128-bit secret.

    One rank creates it and sends it to the others by any means (a store, an argument). Nothing appears in the file
    system. Only processes that have the address can join; on this host, only processes of the same user.

    Args:
        at: for ranks on several hosts: what `listen` returned on rank 0, which must then create the address. The other
            ranks listen on the network card that reaches rank 0, unless they listen already.
    """
    address: str = _native.new_address()
    return "@".join((address, *filter(None, [",".join(at)])))


def host_id() -> str:
    """Return a text that is equal for processes that can share memory: same boot, network namespace and user.

    PHOTINUS_HOST_ID overrides it.
    """
    return env.HOST_ID.get() or f"{network_id()}-{os.geteuid()}"


def network_id() -> str:
    """Return a text that is equal for processes that have loopback in common: same boot and network namespace."""
    try:
        with open(_BOOT_ID) as file:
            boot = file.read().strip()
    except OSError as error:
        if text := env.HOST_ID.get():
            return text
        raise HostError(
            f"{_BOOT_ID}, which identifies the host, cannot be read ({error.strerror}). Set {env.HOST_ID.name} to "
            f"a text that is equal on all ranks of a host, and different on each host."
        ) from None
    return f"{boot}-{os.stat(_NETWORK).st_ino}"


def listen(addresses: Sequence[str]) -> list[str]:
    """Open this process's listener for ranks of other hosts, on addresses of this host. It serves all groups.

    Args:
        addresses: IPv4 or IPv6 addresses, in digits. Only peers that know a group's address are let in.

    Returns:
        "ip:port" of each, for the `Place` of this process. The same addresses give the same result again.

    Raises:
        ValueError: a text is not an address, or the addresses are not those of the first call.
        HostError: this host does not have an address, or the process may open too few descriptors (ulimit -n).
    """
    found: list[str] = _native.listen(list(addresses))
    return found


def allocate(nbytes: int) -> memoryview:
    """Allocate bytes in this process's arena, which peers see. They are freed when the last view of them is dropped.

    Args:
        nbytes: number of bytes, at least 0. Memory is taken at the first touch. The contents are undefined.

    Raises:
        ValueError: nbytes is negative.
        HostError: the arena (address space of twice the machine's memory) has no gap of this size.
    """
    if nbytes < 0:
        raise ValueError(f"allocate({nbytes}): needs a number of bytes of at least 0")
    return memoryview(_native.ArenaBuffer(nbytes))


def cuda_device(index: int) -> CudaDevice:
    """Return the copy engines of a GPU. Calls on tensors in its memory name them as their `device`.

    A process has one such object per GPU, created at the first call, with the attributes `index` and `name`. The driver
    (CUDA 12.0 or newer) is looked for here and not before.

    Args:
        index: index of the GPU, as CUDA_VISIBLE_DEVICES counts.

    Raises:
        HostError: there is no driver, it is too old, there is no GPU, or it is another process's; says what to do.
        ValueError: there is no GPU with this index.
    """
    return _native.cuda_device(index)


def call_site() -> str:
    """Return the line of the user's program that runs now, as messages quote it ("train.py:41"); "" if unknown."""
    site: str = _native.call_site()
    return site


@contextmanager
def label(text: str) -> Iterator[None]:
    """Label this thread's collectives inside `with`, for example with the name of a parameter.

    If labels differ between ranks, the ranks get MismatchError. This finds tensors of equal size in different orders.
    It works for torch.distributed's calls on backend photinus too. At most 127 bytes are kept.

        with engine.label(name):
            dist.all_reduce(parameter.grad)
    """
    before = _native.set_label(text)
    try:
        yield
    finally:
        _native.set_label(before)


def explain(
    counts: Sequence[int],
    operation: str,
    sizes_elems: Sequence[int],
    dtype: str = "float32",
    *,
    speeds: tuple[float, float] = (0.0, 0.0),
) -> tuple[str, list[dict[str, Any]]]:
    """Return how calls on tensors in arenas would run on some hosts, which need not exist.

    Args:
        counts: number of ranks on each host.
        operation: name of a collective without parts.
        sizes_elems: sizes of the calls in elements, as `Communicator` counts them.
        speeds: speeds between the hosts, like `Communicator.speeds`; 0: those of the model in docs/scale.md.

    Returns:
        The list of levels with its reason, empty for one host; and for each size its algorithm, levels, kernels,
            seconds by the model, and the reason.
    """
    about, rows = _native.explain_hosts(
        list(counts), env.LEVELS.get(), speeds, OPERATIONS[operation], DTYPES[dtype], list(sizes_elems)
    )
    return about, [dict(zip(("algorithm", "levels", "kernels", "seconds", "reason"), row, strict=True)) for row in rows]


class Communicator:
    """A group of ranks and its operations on arrays: numpy's, or anything with the array interface.

    Ranks on one host share memory. `submit`, `run` and `message` take addresses of raw memory in place of arrays.

    Collectives run one at a time, in the order in which they are submitted. Messages (send, recv) run beside them, in
    order for each peer, direction and tag. Different communicators are independent. All methods are thread-safe. If
    ranks call different collectives, all get MismatchError before any output is written. It shows both calls and their
    lines in the program. The group stays usable, except after a deadlock. If nobody waits for an asynchronous call that
    fails, the next call or `close` raises.

    Args:
        rank: rank of this process, 0 <= rank < world_size.
        world_size: number of processes in the group.
        address: from `new_address()`, the same on all ranks.
        timeout_s: timeout of the rendezvous, and the default for collectives. Default: PHOTINUS_TIMEOUT_S (300).
        name: the group's name in messages.
        grace_s: seconds without a sign of life after which a rank counts as lost. Default: PHOTINUS_GRACE_S (120).
        chunk_bytes: size of chunks outside the arena; a multiple of 64, equal on all ranks. Default: 256 KiB.
        places: place of each rank, the same on all ranks; empty if all are on one host.
        job, attempt: name of the job and number of its restarts, the same on all ranks. With `places`, processes of
            different jobs and attempts are refused and logged.
        speeds: `Communicator.speeds` of a group with all ranks of this one, used instead of measuring.

    Raises:
        CollectiveTimeoutError: not all ranks joined in time; names those that are missing.
        ValueError: arguments are wrong; this processor lacks PHOTINUS_INSTRUCTION_SET; or this rank was refused (its
            rank is taken, or its world size differs).
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: str,
        *,
        timeout_s: float | None = None,
        name: str = "world",
        grace_s: float | None = None,
        chunk_bytes: int | None = None,
        places: Sequence[Place] = (),
        job: str = "",
        attempt: int = 0,
        speeds: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        address, _, at = address.partition("@")
        timeout_s = env.TIMEOUT_S.get() if timeout_s is None else timeout_s
        if at and not places:
            places = _exchange_places(rank, world_size, address, at.split(","), timeout_s, job, attempt)
        self._native = _native.Communicator.connect(
            rank,
            world_size,
            address,
            name,
            timeout_s,
            env.GRACE_S.get() if grace_s is None else grace_s,
            env.WAITING_S.get(),
            chunk_bytes or 0,
            env.STRICT_SITES.get(),
            places,
            job,
            attempt,
            env.LEVELS.get(),
            speeds,
        )
        self.rank = rank
        self.world_size = world_size
        self.name = name
        self._owner = os.getpid()
        _open.add(self)

    def all_reduce(
        self,
        array: Any,
        reduction: str = "sum",
        *,
        factor: float = 1.0,
        label: str = "",
        wire_dtype: str | None = None,
        asynchronous: bool = False,
    ) -> Work:
        """Reduce the arrays of all ranks (same shape and type) into each of them, in the order of a binary tree over
        ranks.

        Args:
            reduction: a name in REDUCTIONS; `factor` is this rank's factor for "premul_sum".
            label: name of the array, such as a parameter's: ranks whose labels differ get MismatchError.
            wire_dtype: type of the values between hosts, for sums, averages and products. "bfloat16" or "float16" for
                float32: half the bytes, and still the same bits on all ranks. "float32" for these two: the bits of one
                host, 1.5 times the bytes. Equal on all ranks; no effect on one host.
        """
        block = facts(array, writable=True)
        return self._call("all_reduce", block, block[0], reduction, 0, asynchronous, array, factor, label, wire_dtype)

    def reduce(
        self,
        array: Any,
        root: int = 0,
        reduction: str = "sum",
        *,
        factor: float = 1.0,
        wire_dtype: str | None = None,
        asynchronous: bool = False,
    ) -> Work:
        """Reduce the arrays of all ranks into rank `root`'s, as all_reduce does. The other arrays stay as they are."""
        block = facts(array, writable=self.rank == root)
        root = self._root(root)
        return self._call("reduce", block, block[0], reduction, root, asynchronous, array, factor, "", wire_dtype)

    def all_to_all(self, outs: Sequence[Any], arrays: Sequence[Any], *, asynchronous: bool = False) -> Work:
        """Send arrays[r] to rank r and receive outs[r] from it. Sizes may differ from pair to pair."""
        return self._exchange("all_to_all", outs, arrays, 0, asynchronous)

    def gather(self, outs: Sequence[Any] | None, array: Any, root: int = 0, *, asynchronous: bool = False) -> Work:
        """Send all ranks' arrays, which may differ in size, to rank `root`: into outs[r] there (None elsewhere)."""
        arrays: list[Any] = [None] * self.world_size
        arrays[self._root(root)] = array
        return self._exchange("gather", outs if self.rank == root else None, arrays, root, asynchronous)

    def scatter(self, out: Any, arrays: Sequence[Any] | None, root: int = 0, *, asynchronous: bool = False) -> Work:
        """Send rank `root`'s arrays[r] (None elsewhere) to rank r. Sizes may differ."""
        outs: list[Any] = [None] * self.world_size
        outs[self._root(root)] = out
        return self._exchange("scatter", outs, arrays if self.rank == root else None, root, asynchronous)

    def all_gather_list(self, outs: Sequence[Any], array: Any, *, asynchronous: bool = False) -> Work:
        """Send all ranks' arrays, which may differ in size, to all ranks: rank r's into outs[r]."""
        return self._exchange("all_gather", outs, [array] * self.world_size, 0, asynchronous)

    def send(self, array: Any, peer: int, tag: int = 0, *, asynchronous: bool = False) -> Work:
        """Send an array to a rank, which must receive one of the same size and type. Done when the rank has it."""
        address, elems, dtype, _ = facts(array, writable=False)
        if peer < 0:
            raise ValueError(f"send: {peer} is not a rank of this group of {self.world_size}")
        return self.message(OPERATIONS["send"], address, elems, dtype, peer, tag, 0.0, asynchronous, array)

    def recv(self, array: Any, peer: int = ANY_RANK, tag: int = 0, *, asynchronous: bool = False) -> Work:
        """Receive an array from a rank, or from the first rank that sends with this tag (`Work.source_rank`)."""
        address, elems, dtype, _ = facts(array, writable=True)
        if peer < ANY_RANK:
            raise ValueError(f"recv: {peer} is not a rank of this group of {self.world_size}")
        return self.message(OPERATIONS["recv"], address, elems, dtype, peer, tag, 0.0, asynchronous, array)

    def broadcast(self, array: Any, root: int = 0, *, asynchronous: bool = False) -> Work:
        """Copy rank `root`'s array into every rank's array."""
        block = facts(array, writable=self.rank != root)
        return self._call("broadcast", block, block[0], "sum", self._root(root), asynchronous, array)

    def all_gather(self, out: Any, array: Any, *, asynchronous: bool = False) -> Work:
        """Copy all ranks' arrays, in rank order, into `out` (world_size times as long)."""
        _, elems, dtype, _ = block = facts(array, writable=False)
        recv, room, out_dtype, _ = facts(out, writable=True)
        self._fits("all_gather", "out", room, out_dtype, elems * self.world_size, dtype)
        return self._call("all_gather", block, recv, "sum", 0, asynchronous, (out, array))

    def reduce_scatter(
        self,
        out: Any,
        array: Any,
        reduction: str = "sum",
        *,
        wire_dtype: str | None = None,
        asynchronous: bool = False,
    ) -> Work:
        """Reduce the arrays of all ranks and write this rank's part (1 / world_size of them) into `out`.

        `wire_dtype` is as in all_reduce, and nothing is rounded after the last addition.
        """
        recv, elems, dtype, _ = facts(out, writable=True)
        send, count, in_dtype, shape = facts(array, writable=False)
        self._fits("reduce_scatter", "array", count, in_dtype, elems * self.world_size, dtype)
        keep = (out, array)
        return self._call(
            "reduce_scatter", (send, elems, dtype, shape), recv, reduction, 0, asynchronous, keep, wire_dtype=wire_dtype
        )

    def barrier(self, *, asynchronous: bool = False) -> Work:
        """Wait until all ranks have called it."""
        return self.submit(Call(OPERATIONS["barrier"], asynchronous=asynchronous))

    def _call(
        self,
        operation: str,
        block: tuple[int, int, int, tuple[int, ...]],
        recv: int,
        reduction: str,
        root: int,
        asynchronous: bool,
        keep: object,
        factor: float = 1.0,
        label: str = "",
        wire_dtype: str | None = None,
    ) -> Work:
        if reduction not in REDUCTIONS:
            raise ValueError(f"{operation}: reduction {reduction!r} is unknown; known are {', '.join(REDUCTIONS)}")
        if wire_dtype is not None and wire_dtype not in DTYPES:
            raise ValueError(f"{operation}: wire_dtype {wire_dtype!r} is unknown; known are {', '.join(DTYPES)}")
        code, wire = REDUCTIONS[reduction], None if wire_dtype is None else DTYPES[wire_dtype]
        operation_code, (send, elems, dtype, shape) = OPERATIONS[operation], block
        call = Call(
            operation_code, send, recv, elems, dtype, code, root, 0.0, asynchronous, factor, label, 0, wire, shape
        )
        return self.submit(call, keep)

    def _exchange(
        self, operation: str, outs: Sequence[Any] | None, arrays: Sequence[Any] | None, root: int, asynchronous: bool
    ) -> Work:
        dtypes: set[int] = set()
        shapes: set[tuple[int, ...]] = set()

        def parts(buffers: Sequence[Any] | None, what: str, *, writable: bool) -> list[Part]:
            if buffers is None:
                buffers = [None] * self.world_size
            if len(buffers) != self.world_size:
                raise ValueError(
                    f"{operation}: {what} has {len(buffers)} arrays, needs one for each of {self.world_size} ranks"
                )
            found: list[Part] = []
            for array in buffers:
                if array is None:
                    found.append((0, 0))
                    continue
                address, elems, dtype, shape = facts(array, writable=writable)
                dtypes.add(dtype)
                shapes.add(shape)
                found.append((address, elems))
            return found

        recvs = parts(outs, "outs", writable=True)
        sends = parts(arrays, "arrays", writable=False)
        if len(dtypes) > 1:
            names = {code: name for name, code in DTYPES.items()}
            raise ValueError(f"{operation}: arrays of several types, {', '.join(sorted(names[d] for d in dtypes))}")
        dtype = dtypes.pop() if dtypes else 0
        shape = shapes.pop() if len(shapes) == 1 else None
        code = OPERATIONS[operation]
        call = Call(code, 0, 0, 0, dtype, 0, root, asynchronous=asynchronous, shape=shape, sends=sends, recvs=recvs)
        return self.submit(call, (outs, arrays))

    def _root(self, root: int) -> int:
        if not 0 <= root < self.world_size:
            raise ValueError(f"root {root} is not a rank of this group of {self.world_size}")
        return root

    def _fits(self, operation: str, what: str, elems: int, given_dtype: int, needed: int, dtype: int) -> None:
        if elems != needed or given_dtype != dtype:
            names = {code: name for name, code in DTYPES.items()}
            raise ValueError(
                f"{operation}: {what} has {elems} elements of {names[given_dtype]}, needs {needed} of {names[dtype]} "
                f"in a group of {self.world_size}"
            )

    def submit(self, call: Call, keep: object = None) -> Work:
        """Start a collective on raw memory. `call` says whether to wait here for its end.

        Args:
            call: the collective.
            keep: an object to keep alive until the collective is done and its copies on a GPU have ended.

        Raises:
            ValueError: arguments are wrong, or a graph is being captured on the stream; nothing was exchanged.
            AbortedError: the communicator is closed.
            OSError: the GPU's driver refused something.
        """
        work = self._native.submit(call, keep)
        self.raise_lost()
        return work

    def raise_lost(self) -> bool:
        """Raise the error of a call that nobody can ask for any more. Return whether others are left.

        It is called after a call, so that ranks that learn of it at different calls stay in step.
        """
        if not self._native.has_failures:
            return False
        self._native.raise_lost(True)
        return True

    def run(self, call: Call) -> None:
        """Run a collective and wait for it, whatever the call says: like `submit` without a handle, and faster."""
        self._native.run(call)

    def message(
        self,
        operation: int,
        address: int,
        elems: int,
        dtype: int,
        peer: int,
        tag: int = 0,
        timeout_s: float = 0.0,
        asynchronous: bool = True,
        keep: object = None,
        kind: str = "",
        device: CudaDevice | None = None,
        stream: int = 0,
    ) -> Work:
        """Start a send or recv (from OPERATIONS) on raw memory. With ANY_RANK as `peer`, recv takes the first message.

        A send is done when the receiver has all of it. `Work.source_rank` is the sender of a message. `kind` names
        elements that travel as a different type ("uint16" as int16): the receiver must name the same. `keep` is as in
        `submit`; `device` and `stream` are as in Call.
        """
        work = self._native.message(
            operation, address, elems, dtype, peer, tag, timeout_s, asynchronous, keep, kind, device, stream
        )
        self.raise_lost()
        return work

    def wait_outside(self, key: str, timeout_s: float) -> OutsideWait:
        """Begin a wait for ranks of this group by other means than an operation, as for ranks that join another group.

        The waiting code calls `look(missing, description)` now and then. `look` logs after a while which ranks are
        missing. It raises when one of them has exited, the ranks wait for each other, or the timeout has passed.

        Args:
            key: name of the wait, the same text on all ranks that wait for the same.
            timeout_s: timeout in seconds.
        """
        return self._native.wait_outside(key, timeout_s)

    def explain(self, operation: str, elems: int, dtype: str = "float32", *, in_arena: bool = True) -> str:
        """Return how a call would run, and why, as text for people."""
        text: str = self._native.explain(OPERATIONS[operation], elems, DTYPES[dtype], in_arena)
        return text

    @property
    def speeds(self) -> tuple[float, float]:
        """Return the measured latency between hosts (one way, seconds) and the bytes per second; 0 where unknown."""
        return self._native.speeds

    @property
    def about_hosts(self) -> str:
        """Return text on what was measured between hosts, and the levels with their reason; "" on one host."""
        text: str = self._native.about_hosts
        return text

    def under_way_s(self) -> dict[int, float]:
        """Return the seconds during which bytes were under way on each link to another host, by the rank there.

        The kernel counts them since the link was opened: bytes sent and not acknowledged, without the time in which the
        other end took nothing. Empty if it does not.
        """
        return dict(self._native.under_way_s())

    def abort(self, reason: str) -> None:
        """End everything here, and immediately at peers that wait for this rank. Later calls raise AbortedError."""
        self._native.abort(reason)

    def set_reason(self, text: str) -> None:
        """Set the text that peers read as this rank's reason if it exits. An empty text removes it."""
        self._native.set_reason(text)

    def close(self) -> None:
        """Leave the group in order. Idempotent; also done at exit. In a forked child it does nothing."""
        if os.getpid() != self._owner:  # locks may be held by threads that the child does not have
            return
        self._native.close()
        _open.discard(self)
        with nullcontext() if sys.exc_info()[1] is None else printed(fails=False):  # another error is on its way
            self._native.raise_lost(False)

    # The default binds the function now: at interpreter exit, module globals may be None.
    def __del__(self, is_at_end: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_owner") and not is_at_end():  # it had been made, and is not closed at exit
            with printed():
                self.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.set_reason(f"{type(error).__name__}: {error}")
            self.abort(f"{type(error).__name__}: {error}")
        self.close()


# Left in order even when the user closes nothing: threads end before the interpreter does.
_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _close_all() -> None:
    _native.begin_exit()
    for group in list(_open):
        with printed():
            group.close()


@contextmanager
def printed(*, fails: bool = True) -> Iterator[None]:
    """Print the error that nobody could catch, as at the interpreter's end; `fails`: exit code 0 becomes 1."""
    try:
        yield
    except CollectiveError as error:
        if not hasattr(sys, "last_value"):  # else an uncaught error was shown, and may be why
            print(f"photinus: {error}", file=sys.stderr, flush=True)
            if fails:
                _native.fail_at_exit()


atexit.register(_close_all)


def _has_other_threads() -> bool:
    """Return whether foreign threads run beside this one: each may be about to make its first call."""
    own = threading.current_thread()
    return any(
        each is not own and (getattr(each, "runs_callback", False) or not each.name.startswith("photinus-"))
        for each in threading.enumerate()
    )


_native.set_thread_check(_has_other_threads)


def _exchange_places(
    rank: int, world_size: int, address: str, at: Sequence[str], timeout_s: float, job: str, attempt: int
) -> list[Place]:
    """Get the places of all ranks from rank 0, which listens at `at`."""
    try:
        links = _native.listen([])
    except ValueError:
        if rank == 0:
            raise
        links = listen([reaches_from(at[0].rpartition(":")[0].strip("[]"))])
    own, host = json.dumps((host_id(), socket.gethostname(), os.getpid(), links)), socket.gethostname()[:63]
    texts = _native.exchange_texts(rank, world_size, address, at, host, job, attempt, timeout_s, own)
    return [Place(*json.loads(each)) for each in texts]


def _about() -> dict[str, Any]:
    """Describe the engine on this machine."""
    return {
        "instruction_set": _native.instruction_set(),
        "usable_cores": _native.usable_cores(),
        "host_id": host_id(),
        "timeout_s": env.TIMEOUT_S.get(),
        "grace_s": env.GRACE_S.get(),
    }


if __name__ == "__main__":
    # For the launcher, which starts programs and imports no engine: what the engine is here, or what `explain` answers
    # to the arguments in JSON that are given.
    print(json.dumps({"explained": explain(**json.loads(sys.argv[1]))} if sys.argv[1:] else _about()))
