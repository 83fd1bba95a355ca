"""A group of ranks: its operations on raw memory. `photinus.engine` adds those on arrays."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import NamedTuple, TypeVar

from . import _native, env
from ._native import Call, CudaDevice, OutsideWait, Work
from .arrays import DTYPES
from .errors import CollectiveError

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
    """Where a rank of a group over several hosts is.

    Attributes:
        host_key: equal for ranks that share memory (`engine.host_id`).
        host_name, pid: for messages.
        links: where ranks of other hosts reach it: what `engine.listen` returned there.
    """

    host_key: str
    host_name: str
    pid: int
    links: list[str]


_G = TypeVar("_G", bound="Group")


class Group:
    """The operations of a group of ranks, which share memory where they are on one host.

    Collectives run in the order in which they are submitted, one at a time; messages (send, recv) run beside them, in
    order for each peer, direction and tag; different communicators are independent. All methods may be called from
    any thread. Ranks that call different collectives all get MismatchError, before any output is written, with both
    sides' calls and the lines of the program in which they stand; the group stays usable, except after a deadlock.
    An error of an asynchronous call for which nobody has waited is raised by the next call, or by `close`.

    Args:
        rank: this process, 0 <= rank < world_size.
        world_size: number of processes of the group.
        address: from `new_address()`, the same on all ranks.
        timeout_s: deadline of the meeting, and of collectives that bring no other. Default PHOTINUS_TIMEOUT_S (300).
        name: the group's name in messages.
        grace_s: how long a rank may show no sign of life before the others give it up. Default PHOTINUS_GRACE_S (120).
        chunk_bytes: of what tensors outside the arena travel in; a multiple of 64, equal on all ranks. Default 256 KiB.
        places: where each rank is, the same on all ranks; empty when all are on one host.
        job, attempt: which job the group is of, and how often it was restarted; the same on all ranks. With `places`,
            processes of other jobs and attempts are turned away with a line that names both.
        speeds: between hosts, of a group that holds all ranks of this one (`Group.speeds`): then nothing is measured.

    Raises:
        CollectiveTimeoutError: not all ranks came in time; names those that are missing.
        ValueError: wrong arguments, a PHOTINUS_INSTRUCTION_SET that this processor does not have, or this rank was
            refused (its rank is taken, another world size).
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
        """Starts a collective on raw memory; `call` says whether it waits here for its end.

        Args:
            call: the collective.
            keep: an object that is kept alive from before the collective can begin until it is done and its copies on
                a GPU have ended, whatever the caller drops.

        Raises:
            ValueError: wrong arguments, or a stream that is being captured into a graph; nothing was exchanged.
            AbortedError: the communicator is closed.
            OSError: the GPU's driver refused something.
        """
        work = self._native.submit(call, keep)
        self.raise_lost()
        return work

    def raise_lost(self) -> bool:
        """Raises the error of a call that nobody can ask for any more; returns whether others are left.

        Called behind a call, so that ranks that learn of it at different calls stay in step.
        """
        if not self._native.has_failures:
            return False
        self._native.raise_lost(True)
        return True

    def run(self, call: Call) -> None:
        """Does a collective here and now, whatever the call says: `submit` without a handle, and faster."""
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
        """Starts a send or recv (from OPERATIONS) on raw memory; ANY_RANK as `peer` receives from whoever sends first.

        A send is done when the receiver has all of it. `Work.source_rank` tells where a message came from. `kind` names
        elements that travel as another type ("uint16" as int16): the receiver must name the same. `keep` is as in
        `submit`; `device` and `stream` are as in Call.
        """
        work = self._native.message(
            operation, address, elems, dtype, peer, tag, timeout_s, asynchronous, keep, kind, device, stream
        )
        self.raise_lost()
        return work

    def wait_outside(self, key: str, timeout_s: float) -> OutsideWait:
        """Begins a wait for ranks of this group by other means than an operation, as for ranks that join a further one.

        Whoever waits calls `look(missing, description)` now and then: it says after a while for whom it waits, and
        raises when one of these ranks has gone, the ranks wait for each other, or the deadline has passed.

        Args:
            key: what is waited for, the same text on all ranks that wait for the same.
            timeout_s: deadline in seconds.
        """
        return self._native.wait_outside(key, timeout_s)

    def explain(self, operation: str, elems: int, dtype: str = "float32", *, in_arena: bool = True) -> str:
        """How a call would run, and why, for people."""
        text: str = self._native.explain(OPERATIONS[operation], elems, DTYPES[dtype], in_arena)
        return text

    @property
    def speeds(self) -> tuple[float, float]:
        """Between hosts, as measured: the latency one way in seconds, and bytes a second; 0 for what is not known."""
        return self._native.speeds

    @property
    def about_hosts(self) -> str:
        """What was measured between the group's hosts, and the levels it takes, with the reason; empty on one host."""
        text: str = self._native.about_hosts
        return text

    def under_way_s(self) -> dict[int, float]:
        """By rank of another host with which this one exchanges: for how many seconds bytes were under way on the link.

        As the kernel counts it, since the link was made: sent and not acknowledged yet, without the time in which the
        other end took nothing. Empty where it does not tell.
        """
        return dict(self._native.under_way_s())

    def abort(self, reason: str) -> None:
        """Ends everything here and, at once, at peers that wait for this rank. Later calls raise AbortedError."""
        self._native.abort(reason)

    def set_reason(self, text: str) -> None:
        """Leaves a text that peers read as this rank's own reason if it goes away; an empty text takes it back."""
        self._native.set_reason(text)

    def close(self) -> None:
        """Leaves the group in order. Idempotent; also done at exit. In a forked child it does nothing."""
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
    """Prints what nobody could catch, as at the interpreter's end; `fails`: exit code 0 becomes 1."""
    try:
        yield
    except CollectiveError as error:
        if not hasattr(sys, "last_value"):  # else an uncaught error was shown, and may be why
            print(f"photinus: {error}", file=sys.stderr, flush=True)
            if fails:
                _native.fail_at_exit()


atexit.register(_close_all)


def _has_other_threads() -> bool:
    """Whether threads that are not ours run beside this one: any may be about to make its first call."""
    own = threading.current_thread()
    return any(
        each is not own and (getattr(each, "runs_callback", False) or not each.name.startswith("photinus-"))
        for each in threading.enumerate()
    )


_native.set_thread_check(_has_other_threads)
