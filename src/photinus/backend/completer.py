"""Completes the futures of a group's operations, from as many threads as its callbacks keep busy.

Operations of one engine communicator end in the order in which they were submitted, so one thread at a time, the
leader, waits for the oldest; when it ends, the leader appoints another thread before it runs the callbacks. A callback
may therefore wait for further collectives, to any depth (with a fixed number of threads it deadlocks: PowerSGD's hook
on one thread, gloo's two at depth 3). All ranks start such collectives in one order, because a thread that runs no
callback starts none while callbacks of earlier ones are to come or run (`settle`). Without nesting it is one thread. It
goes when nothing is left to complete: libraries' tests look for threads that stay. A moment later, that is, for a new
thread costs several callbacks, and in a busy loop the next one comes within that moment.

The pattern is leader/followers: Schmidt et al., "Leader/Followers", Pattern Languages of Programs 2000.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from .. import _native

_IDLE_S = 0.02

Complete: TypeAlias = Callable[[BaseException | None], None]
"""Runs the callbacks of an operation that ended, with its error if it has one; may block."""
Submit: TypeAlias = Callable[[Callable[[], object], Complete, bool], None]
"""`submit(wait, complete, may_exchange)` of a completer, or its `submit_apart`."""


class _Item(NamedTuple):
    wait: Callable[[], object]  # blocks until the operation ended; raises its error
    complete: Complete
    round: int | None  # in which `unsettled` counts it


def outcome(wait: Callable[[], object]) -> BaseException | None:
    """What it raises, if it does."""
    try:
        wait()
    except Exception as raised:  # noqa: BLE001 - handed on to complete()
        return raised
    return None


class _Thread(threading.Thread):
    """Runs callbacks."""


class Completer:
    """See the module. Threads start with the first `submit`.

    Attributes:
        unsettled: operations whose callbacks may start collectives, and have not all run.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._settled = threading.Condition(self._changed._lock)  # type: ignore[attr-defined]
        self.unsettled = 0
        self._round = 0
        self._waiting: deque[_Item] = deque()
        self._led = False  # a thread is in an item's wait()
        self._appointed = False  # a thread was woken or started to lead, and has not come to it yet
        self._idle = 0  # threads that wait to lead, those included that are just starting
        self._closed = False
        self._threads: set[threading.Thread] = set()

    def submit(self, wait: Callable[[], object], complete: Complete, may_exchange: bool = False) -> None:
        """Calls `complete(error)` on a thread of its own as soon as `wait()` returned or raised `error`.

        Args:
            may_exchange: whether it may start collectives.
        """
        with self._changed:
            self.unsettled += may_exchange
            self._waiting.append(_Item(wait, complete, self._round if may_exchange else None))
            if not self._led:
                self._appoint()

    def settle(self, timeout_s: float) -> None:
        """Waits until the callbacks that may start collectives have run, unless this thread runs one, of any group.

        After `timeout_s` seconds it gives those up for good, with a warning: they may wait for this thread.
        """
        if isinstance(threading.current_thread(), _Thread):  # callbacks of two groups would wait for each other
            return
        with self._settled:
            if self._settled.wait_for(lambda: not self.unsettled, timeout_s):
                return
            self._round, self.unsettled = self._round + 1, 0
        warnings.warn(
            f"group {self._name}: callbacks of earlier collectives have not ended within {timeout_s:g} s, and are not "
            f"waited for any more. If they start collectives, the ranks may start theirs in different orders.",
            RuntimeWarning,
            stacklevel=2,
        )

    def submit_apart(self, wait: Callable[[], object], complete: Complete, may_exchange: bool = False) -> None:
        """The same for an operation that ends in no order with the others: on a thread that waits for it alone."""

        def serve() -> None:
            _native.go_on_at_exit()
            try:
                complete(outcome(wait))
            finally:
                self._threads.discard(threading.current_thread())

        thread = _Thread(target=serve, name=f"photinus-completer-{self._name}", daemon=True)
        with self._changed:
            self._threads.add(thread)
            thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the threads after what is submitted, which the caller made end, and waits for them; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        # Anew each time: a thread that leads appoints others.
        while others := [thread for thread in list(self._threads) if thread is not threading.current_thread()]:
            others[0].join(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                return

    def _appoint(self) -> None:  # with the lock held
        if self._appointed:
            return
        if self._idle:
            self._changed.notify()
        else:
            thread = _Thread(target=self._serve, name=f"photinus-completer-{self._name}", daemon=True)
            thread.start()
            self._threads.add(thread)
            self._idle += 1
        self._appointed = True

    def _serve(self) -> None:
        _native.go_on_at_exit()
        try:
            while (item := self._lead()) is not None:
                error = outcome(item.wait)
                with self._changed:
                    self._led = False
                    if self._waiting:
                        self._appoint()
                item.complete(error)
                with self._changed:
                    self._idle += 1
                    self.unsettled -= item.round == self._round
                    if not self.unsettled:
                        self._settled.notify_all()
                del item, error  # or an idle thread would keep the last operation's tensors
        finally:
            self._threads.discard(threading.current_thread())

    def _lead(self) -> _Item | None:
        """Waits, counted as idle, for an item and the lead, and takes both; None when this thread should end."""
        with self._changed:
            try:
                while self._led or not self._waiting:
                    if self._closed and not self._waiting:
                        return None
                    if not self._changed.wait(_IDLE_S) and (self._led or not self._waiting):
                        return None
            finally:
                self._idle -= 1
            self._led, self._appointed = True, False
            item = self._waiting.popleft()
            if self._closed and not self._waiting:
                self._changed.notify_all()  # there will be no other to lead for
            return item
