"""Completes the futures of a group's operations, from as many threads as its callbacks keep busy.

Works that have ended, well or not, stand in one native queue, in the order of their ends. One thread at a time takes
the next; while it runs the callbacks, another one takes over. A callback may therefore wait for further collectives,
to any depth (with a fixed number of threads it deadlocks: PowerSGD's hook on one thread, gloo's two at depth 3). All
ranks start such collectives in one order, because a thread that runs no callback starts none while callbacks of earlier
ones are to come or run (`settle`). Without nesting it is one thread. It goes when nothing is left to complete:
libraries' tests look for threads that stay. A moment later, that is, for a new thread costs several callbacks, and in a
busy loop the next one comes within that moment.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from .. import _native

_IDLE_S = 0.02

Complete: TypeAlias = Callable[[BaseException | None], None]
"""Runs the callbacks of an operation that ended, with its error if it has one; may block."""
Submit: TypeAlias = Callable[[_native.Work, Callable[[], object], Complete, bool], None]
"""A completer's `submit(handle, finish, complete, may_exchange)`."""


class _Item(NamedTuple):
    finish: Callable[[], object]  # raises the operation's error
    complete: Complete


def outcome(finish: Callable[[], object]) -> BaseException | None:
    """The error that it raises, if it does."""
    try:
        finish()
    except Exception as raised:  # noqa: BLE001 - handed on to complete()
        return raised
    return None


class _Thread(threading.Thread):
    """Runs callbacks, which may start collectives."""

    runs_callback = False


def _runs_callbacks() -> bool:
    return isinstance(threading.current_thread(), _Thread)


class Completer:
    """See the module. Threads start with the first `submit`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._ended = _native.EndedWorks()
        self._taking = threading.Lock()  # held by the thread that takes the next item, until it has seen to a successor
        self._lock = (
            threading.Lock()
        )  # guards what follows; a condition's may stay locked where a signal's handler raises
        self._settled = threading.Condition(self._lock)
        self._unsettled: dict[int, _Item] = {}  # items whose callbacks may start collectives, and have not all run
        self._idle: set[threading.Thread] = set()  # that take items, or wait to
        self._threads: set[threading.Thread] = set()

    @property
    def unsettled(self) -> int:
        """Operations whose callbacks may start collectives, and have not all run."""
        return len(self._unsettled)

    def submit(
        self, handle: _native.Work, finish: Callable[[], object], complete: Complete, may_exchange: bool = False
    ) -> None:
        """Calls `complete(error)` on a thread of its own once an operation has ended; `finish()` raises the error.

        Args:
            may_exchange: whether it may start collectives.

        Raises:
            RuntimeError: no thread can be started, and there is none that could do it. Then it is never called.
        """
        item = _Item(finish, complete)
        with self._lock:
            self._need_thread()
            try:
                if may_exchange:
                    self._unsettled[id(item)] = item
                self._ended.put_when_ended(handle, item)
            except BaseException:
                self._unsettled.pop(id(item), None)
                raise

    def settle(self, timeout_s: float) -> None:
        """Waits until the callbacks that may start collectives have run, unless this thread runs one, of any group.

        After `timeout_s` seconds it gives those up for good, with a warning: they may wait for this thread.
        """
        if _runs_callbacks():  # callbacks of two groups would wait for each other
            return
        with self._lock:
            if self._settled.wait_for(lambda: not self._unsettled, timeout_s):
                return
            self._unsettled.clear()
        warnings.warn(
            f"group {self._name}: callbacks of earlier collectives did not end within {timeout_s:g} s. The group no "
            f"longer waits for them. If they start collectives, ranks may start these in different orders.",
            RuntimeWarning,
            stacklevel=2,
        )

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the threads after what is submitted, which the caller made end, and waits for them; idempotent."""
        deadline = time.monotonic() + timeout_s
        # Again each time: a thread that takes an item may start others. A forked child has none, and locks nothing.
        while others := [each for each in {*self._threads} - {threading.current_thread()} if each.is_alive()]:
            self._ended.close()
            others[0].join(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                return

    def _need_thread(self) -> None:  # with the lock held
        """Starts a thread unless one is idle. Where that fails, one that runs a callback takes the next item later."""
        if self._idle:
            return
        thread = _Thread(target=self._serve, name=f"photinus-completer-{self._name}", daemon=True)
        self._idle.add(thread)
        self._threads.add(thread)
        try:
            thread.start()
        except BaseException as error:
            self._idle.discard(thread)
            self._threads.discard(thread)  # if it has started all the same, it adds itself
            # Where a signal's handler raises once the thread runs, CPython's start() fails in its own clean-up, and
            # its KeyError hides the handler's error.
            if isinstance(error, KeyError) and error.__context__ is not None:
                raise error.__context__ from None
            if isinstance(error, RuntimeError) and self._threads and not _runs_callbacks():
                return
            raise

    def _serve(self) -> None:
        _native.go_on_at_exit()
        thread: Any = threading.current_thread()
        while (entry := self._take()) is not None:
            item, error = entry
            thread.runs_callback = True
            try:
                item.complete(error)
            except Exception:  # noqa: BLE001 - nobody else would see it, and others wait for this thread
                traceback.print_exc()
            thread.runs_callback = False
            with self._lock:
                self._unsettled.pop(id(item), None)
                self._settled.notify_all()
            del entry, item, error  # or an idle thread would keep the last operation's tensors

    def _take(self) -> tuple[_Item, BaseException | None] | None:
        """Waits, counted as idle, for an item, and finishes its operation; None when this thread should end."""
        thread = threading.current_thread()
        with self._lock:
            self._threads.add(thread)
            self._idle.add(thread)
        with self._taking:
            while True:
                item: Any = self._ended.take(_IDLE_S)
                error = None if item is None else outcome(item.finish)
                with self._lock:
                    if item is None and not self._ended.is_empty():
                        continue
                    self._idle.discard(thread)
                    if item is None:
                        self._threads.discard(thread)
                        return None
                    if not self._ended.is_empty():
                        with contextlib.suppress(RuntimeError):
                            self._need_thread()
                    return item, error
