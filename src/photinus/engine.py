"""The engine's Python face: collectives among processes of one host through shared memory. Needs no torch.

    address = engine.new_address()                    # in one process; bring it to the others by any means
    with engine.Communicator(rank, world_size, address) as communicator:
        communicator.all_reduce(array, "avg")         # numpy arrays, or anything with the array interface

Arrays made over `allocate` lie in shared memory and are reduced where they lie; others go through slots, chunk by
chunk. Addition follows rank order, so every run gives the same bits on every rank.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from types import TracebackType
from typing import Any

from . import _native, env
from ._native import Work

__all__ = ["DTYPES", "OPERATIONS", "REDUCTIONS", "Communicator", "Work", "allocate", "host_id", "new_address"]

DTYPES: dict[str, int] = _native.DTYPES
"""Element types by name, as the engine numbers them."""
REDUCTIONS: dict[str, int] = _native.REDUCTIONS
"""Reductions by name. "avg" divides the sum by the number of ranks; on integers it truncates towards zero."""
OPERATIONS: dict[str, int] = _native.OPERATIONS
"""Collectives by name."""

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NETWORK = "/proc/self/ns/net"


def new_address() -> str:
    """A new printable rendezvous of one group: the name of an abstract Unix socket and a secret of 128 bits.

    One rank makes it and brings it to the others by any means (a store, an argument). Nothing appears in the file
    system; only processes of the same user that have the address can join.
    """
    address: str = _native.new_address()
    return address


def host_id() -> str:
    """A text that is equal for processes that can share memory: same boot, network namespace and user.

    PHOTINUS_HOST_ID overrides it.
    """
    given = env.HOST_ID.get()
    if given:
        return given
    with open(_BOOT_ID) as file:
        boot = file.read().strip()
    return f"{boot}-{os.stat(_NETWORK).st_ino}-{os.geteuid()}"


def allocate(nbytes: int) -> memoryview:
    """Writable bytes in this process's arena, which peers see; given back when the last view of them is dropped.

    Args:
        nbytes: how many, at least 0. Memory is taken when it is first touched. Contents are undefined.

    Raises:
        ValueError: nbytes is negative.
        OSError: the arena (address space of twice the machine's memory) has no gap so large.
    """
    if nbytes < 0:
        raise ValueError(f"allocate({nbytes}): needs a number of bytes of at least 0")
    return memoryview(_native.ArenaBuffer(nbytes))


class Communicator:
    """The collectives of a group of ranks on one host.

    Calls run in the order in which they are submitted, one at a time; different communicators are independent. All
    methods may be called from any thread.

    Args:
        rank: this process, 0 <= rank < world_size.
        world_size: number of processes of the group.
        address: from `new_address()`, the same on all ranks.
        timeout_s: deadline of the meeting, and of collectives that bring no other. Default PHOTINUS_TIMEOUT_S (300).
        name: the group's name in messages.

    Raises:
        CollectiveTimeoutError: not all ranks came in time; names those that are missing.
        ValueError: wrong arguments, a PHOTINUS_INSTRUCTION_SET that this processor does not have, or this rank was
            refused (its rank is taken, another world size).
    """

    def __init__(
        self, rank: int, world_size: int, address: str, *, timeout_s: float | None = None, name: str = "world"
    ) -> None:
        _native.instruction_set()  # refuses a wrong PHOTINUS_INSTRUCTION_SET before any rank is met
        self._native = _native.Communicator.connect(
            rank, world_size, address, env.TIMEOUT_S.get() if timeout_s is None else timeout_s, name
        )
        self.rank = rank
        self.world_size = world_size
        self.name = name
        # What calls in flight read and write must live until they are done, whatever the caller drops.
        self._in_flight: deque[tuple[Work, object]] = deque()
        self._in_flight_lock = threading.Lock()
        _open.add(self)

    def submit(
        self,
        operation: int,
        send_address: int,
        recv_address: int,
        elems: int,
        dtype: int,
        reduction: int = 0,
        root: int = 0,
        timeout_s: float = 0.0,
        asynchronous: bool = True,
        keep: object = None,
    ) -> Work:
        """Starts a collective on raw memory.

        Args:
            operation: from OPERATIONS.
            send_address: what this rank gives: `elems` elements (reduce_scatter: world_size * elems).
            recv_address: where the result goes: `elems` elements (all_gather: world_size * elems). May equal
                send_address for all_reduce and broadcast.
            elems: number of elements; 0 is allowed, the ranks still meet.
            dtype: from DTYPES.
            reduction: from REDUCTIONS; read by all_reduce and reduce_scatter.
            root: the rank that gives; read by broadcast.
            timeout_s: deadline in seconds; 0 for the communicator's.
            asynchronous: False waits here, on the caller's thread, and raises what `Work.wait` would.
            keep: an object that is kept alive until the collective is done, at most until the next submit after that.

        Raises:
            ValueError: wrong arguments; nothing was exchanged.
            AbortedError: the communicator is closed.
        """
        work: Work = self._native.submit(
            operation, send_address, recv_address, elems, dtype, reduction, root, timeout_s, asynchronous
        )
        if asynchronous:
            with self._in_flight_lock:
                in_flight = self._in_flight
                in_flight.append((work, keep))
                while in_flight and in_flight[0][0].is_completed():
                    in_flight.popleft()
        return work

    def all_reduce(self, array: Any, reduction: str = "sum", *, asynchronous: bool = False) -> Work:
        """Combines all ranks' arrays (same shape and type) into each of them, in rank order."""
        address, elems, dtype = _facts(array, writable=True)
        return self._call("all_reduce", address, address, elems, dtype, reduction, 0, asynchronous, array)

    def broadcast(self, array: Any, root: int = 0, *, asynchronous: bool = False) -> Work:
        """Copies rank `root`'s array into every rank's array."""
        address, elems, dtype = _facts(array, writable=self.rank != root)
        return self._call("broadcast", address, address, elems, dtype, "sum", root, asynchronous, array)

    def all_gather(self, out: Any, array: Any, *, asynchronous: bool = False) -> Work:
        """Puts all ranks' arrays, one behind the other in rank order, into `out` (world_size times as long)."""
        send, elems, dtype = _facts(array, writable=False)
        recv, room, out_dtype = _facts(out, writable=True)
        self._fits("all_gather", "out", room, out_dtype, elems * self.world_size, dtype)
        return self._call("all_gather", send, recv, elems, dtype, "sum", 0, asynchronous, (out, array))

    def reduce_scatter(self, out: Any, array: Any, reduction: str = "sum", *, asynchronous: bool = False) -> Work:
        """Combines all ranks' arrays and puts this rank's part (1 / world_size of them) into `out`."""
        recv, elems, dtype = _facts(out, writable=True)
        send, given, in_dtype = _facts(array, writable=False)
        self._fits("reduce_scatter", "array", given, in_dtype, elems * self.world_size, dtype)
        return self._call("reduce_scatter", send, recv, elems, dtype, reduction, 0, asynchronous, (out, array))

    def barrier(self, *, asynchronous: bool = False) -> Work:
        """Returns when all ranks have called it."""
        return self.submit(OPERATIONS["barrier"], 0, 0, 0, 0, asynchronous=asynchronous)

    def explain(self, operation: str, elems: int, dtype: str = "float32", *, in_arena: bool = True) -> str:
        """How a call would run, and why, for people."""
        text: str = self._native.explain(OPERATIONS[operation], elems, DTYPES[dtype], in_arena)
        return text

    def abort(self, reason: str) -> None:
        """Ends everything here and, at once, at peers that wait for this rank. Later calls raise AbortedError."""
        self._native.abort(reason)

    def set_reason(self, text: str) -> None:
        """Leaves a text that peers read as this rank's own reason if it goes away; an empty text takes it back."""
        self._native.set_reason(text)

    def close(self) -> None:
        """Leaves the group in order. Idempotent; also done at exit."""
        self._native.close()
        with self._in_flight_lock:
            self._in_flight.clear()
        _open.discard(self)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.set_reason(f"{type(error).__name__}: {error}")
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    def _call(
        self,
        operation: str,
        send: int,
        recv: int,
        elems: int,
        dtype: int,
        reduction: str,
        root: int,
        asynchronous: bool,
        keep: object,
    ) -> Work:
        if reduction not in REDUCTIONS:
            raise ValueError(f"{operation}: reduction {reduction!r} is unknown; known are {', '.join(REDUCTIONS)}")
        code = REDUCTIONS[reduction]
        return self.submit(
            OPERATIONS[operation], send, recv, elems, dtype, code, root, asynchronous=asynchronous, keep=keep
        )

    def _fits(self, operation: str, what: str, given: int, given_dtype: int, needed: int, dtype: int) -> None:
        if given != needed or given_dtype != dtype:
            names = {code: name for name, code in DTYPES.items()}
            raise ValueError(
                f"{operation}: {what} has {given} elements of {names[given_dtype]}, needs {needed} of {names[dtype]} "
                f"in a group of {self.world_size}"
            )


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


def _facts(array: Any, *, writable: bool) -> tuple[int, int, int]:
    """Address, number of elements and element type of a C-contiguous array."""
    interface = getattr(array, "__array_interface__", None)
    if interface is None:
        raise TypeError(f"needs a numpy array (or another object with __array_interface__), not {type(array).__name__}")
    name = _BY_TYPESTR.get(interface["typestr"][1:])
    if str(getattr(array, "dtype", "")) == "bfloat16":  # ml_dtypes' arrays call themselves void
        name = "bfloat16"
    if name is None or interface["typestr"][0] == ">":
        raise TypeError(f"element type {array.dtype} is not one of {', '.join(DTYPES)}")
    if interface.get("strides") is not None:
        raise ValueError("needs a C-contiguous array; make one with numpy.ascontiguousarray")
    address, read_only = interface["data"]
    if writable and read_only:
        raise ValueError("the array is read-only, but the result goes into it")
    elems = 1
    for extent in interface["shape"]:
        elems *= extent
    return address, elems, DTYPES[name]


# Left in order even when the user closes nothing: threads end before the interpreter does.
_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _close_all() -> None:
    for communicator in list(_open):
        communicator.close()


atexit.register(_close_all)
