"""A group of ranks: its operations on raw memory. `photinus.engine` adds those on arrays."""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from . import _native, env
from ._native import Call, CudaDevice, OutsideWait, Work
from .errors import CollectiveError

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
"""What goes to or comes from one rank: the address and the number of elements."""


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


_G = TypeVar("_G", bound="Group")


class Group:
    """A group of ranks and its operations. Ranks on one host share memory.

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
        speeds: `Group.speeds` of a group with all ranks of this one, used instead of measuring.

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
        self._native = _native.Communicator.connect(
            rank,
            world_size,
            address,
            name,
            env.TIMEOUT_S.get() if timeout_s is None else timeout_s,
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

    def __del__(self, is_at_end: Callable[[], bool] = sys.is_finalizing) -> None:  # modules' names may be gone
        if hasattr(self, "_owner") and not is_at_end():  # it had been made, and is not closed at exit
            with printed():
                self.close()

    def __enter__(self: _G) -> _G:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.set_reason(f"{type(error).__name__}: {error}")
            self.abort(f"{type(error).__name__}: {error}")
        self.close()


# Left in order even when the user closes nothing: threads end before the interpreter does.
_open: weakref.WeakSet[Group] = weakref.WeakSet()


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
