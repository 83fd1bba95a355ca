"""Handles of operations in flight, as torch.distributed expects them.

Notes on c10d that this file answers to (torch 2.13):
- C++ calls `wait` and `get_future` only, and reads the future's value right after `wait()` returned, so the future is
  complete by then, also one that is asked for only then.
- A future's value is the list of result tensors; DDP's reducer crashes on anything else.
- `Future.set_exception` stores a value that C++ takes for a result. A callback that raises makes a real error.
- A call that is not asynchronous needs no work once it is done: None is the answer, as NCCL's (torch 2.8 on).
- `dist.Work` keeps no reference to its Python half: see `EngineGroup._recent`.

A `Completer` completes the futures of a group's operations, from as many threads as its callbacks keep busy. Works that
have ended, well or not, stand in one native queue, in the order of their ends. One thread at a time takes the next;
while it runs the callbacks, another one takes over. A callback may therefore wait for further collectives, to any depth
(with a fixed number of threads it deadlocks: PowerSGD's hook on one thread, gloo's two at depth 3). All ranks start
such collectives in one order, because a thread that runs no callback starts none while callbacks of earlier ones are to
come or run (`wait_for_callbacks`). Without nesting it is one thread. It ends a moment (20 ms) after the last callback:
libraries' tests look for threads that stay, but a busy loop that started a thread for each callback would pay several
times the callback's own cost.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future, collect_all

from .. import _native
from ..engine import Work
from ..errors import CollectiveError, PhotinusError
from ..waiting_time import waiting_time
from . import torch_tools
from .arguments import Memory
from .torch_tools import outside_dynamo

NO_TIMEOUT = timedelta(0)

# One for all works: futures are rare, and a lock for each work is not free.
_making_future = threading.Lock()


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
        # The lock guards what follows. A condition's own may stay locked where a signal's handler raises.
        self._lock = threading.Lock()
        self._callbacks_ended = threading.Condition(self._lock)
        self._pending: dict[int, _Item] = {}  # items whose callbacks may start collectives, and have not all run
        self._idle: set[threading.Thread] = set()  # that take items, or wait to
        self._threads: set[threading.Thread] = set()

    @property
    def pending(self) -> int:
        """Operations whose callbacks may start collectives, and have not all run."""
        return len(self._pending)

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
                    self._pending[id(item)] = item
                self._ended.put_when_ended(handle, item)
            except BaseException:
                self._pending.pop(id(item), None)
                raise

    def wait_for_callbacks(self, timeout_s: float) -> None:
        """Waits until the callbacks that may start collectives have run, unless this thread runs one, of any group.

        After `timeout_s` seconds it gives those up for good, with a warning: they may wait for this thread.
        """
        if _runs_callbacks():  # callbacks of two groups would wait for each other
            return
        with self._lock:
            if self._callbacks_ended.wait_for(lambda: not self._pending, timeout_s):
                return
            self._pending.clear()
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
                self._pending.pop(id(item), None)
                self._callbacks_ended.notify_all()
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


class _Work(dist.Work):
    """The methods that follow from wait(), is_completed() and exception()."""

    _outputs: Sequence[Tensor]

    def is_success(self) -> bool:
        """Return whether the operation ended without an error."""
        return self.is_completed() and self.exception() is None

    def result(self) -> list[Tensor]:
        """The output tensors; they hold the result after wait()."""
        return list(self._outputs)

    def synchronize(self) -> None:
        """Waits, which orders the current stream of a GPU, too."""
        self.wait()

    def block_current_stream(self) -> None:
        """Waits, which orders the current stream of a GPU, too."""
        self.wait()

    def source_rank(self) -> int:
        """The sender of a message received from any source. Collectives have none: raises PhotinusError."""
        raise PhotinusError("source_rank() is only known for a work of recv() from any source")

    _source_rank = source_rank

    def _see(self) -> None:
        """Mark an error of this work as reported: the caller gets that of a work beside it."""


@outside_dynamo
class EngineWork(_Work):
    """An operation that the engine runs.

    Args:
        submit: completes the future, when somebody asks for one.
        finish: copies results to the outputs; runs once, on the thread that first sees the operation's end.
    """

    def __init__(self, handle: Work, outputs: Sequence[Tensor], submit: Submit, finish: Memory | None = None) -> None:
        super().__init__()
        self._handle = handle
        self._outputs = outputs
        self._submit = submit
        self._finish = finish or None  # nothing to copy is nothing to do
        # Several threads may wait for one work, and the copies are made once.
        if finish:
            self._finishing = threading.Lock()
        self._future: Future[Any] | None = None
        self._event_end: Future[None] | None = None  # it ends with the event by which a profiler shows this

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Blocks without the GIL until the operation is done. Raises CollectiveError subclasses of photinus.errors.

        Args:
            timeout: of this wait; 0 means until the operation's own deadline.
        """
        began = waiting_time.begin() if waiting_time.on else 0
        try:
            self._handle.wait(0.0 if timeout is NO_TIMEOUT else timeout.total_seconds())
        finally:
            if self._event_end is not None and self._handle.is_completed():
                self._event_end.wait()
        if self._finish is not None:
            self._copy_back()
        if self._future is not None:
            self._future.wait()
        if began:
            waiting_time.end(began)
        return True

    def _wait_and_finish(self) -> None:
        self._handle.wait()
        if self._finish is not None:
            self._copy_back()

    def _copy_back(self) -> None:
        with self._finishing:
            if self._finish is not None:
                self._finish()
                self._finish = None

    def is_completed(self) -> bool:
        """Return whether the operation has ended, with or without an error, and its outputs hold the result."""
        if not self._handle.is_completed() or not (self._event_end is None or self._event_end.done()):
            return False
        # Who finds it completed reads the outputs without waiting.
        if self._finish is not None and self._handle.error(sees=False) is None:
            self._copy_back()
        return True

    def exception(self) -> BaseException | None:
        """The error of an operation that has ended with one."""
        return self._handle.error() if self._handle.is_completed() else None

    def _see(self) -> None:
        self._handle.see()
        if self._event_end is not None and self._handle.is_completed():
            self._event_end.wait()

    def get_future(self) -> Future[Any]:
        """A future of the list of output tensors. An error reaches C++ and Python as RuntimeError with our text."""
        with _making_future:
            if self._future is None:
                # C++ adds no callback that starts a collective, and must go on: DDP asks for each bucket's future.
                # Autograd's threads for GPUs have no frame of Python below this one.
                caller = sys._getframe().f_back
                self._future = self._make_future(caller is not None and "get_future" in caller.f_code.co_names)
            return self._future

    def _make_future(self, may_exchange: bool) -> Future[Any]:
        ended = self._new_future()
        # A callback that raises is how a future gets an error that C++ respects, see above.
        result = ended.then(_outputs_or_error)
        if self._handle.is_completed():  # here and now: C++ asks after wait() and reads without waiting
            self._complete(ended, outcome(self._wait_and_finish))
        else:
            self._submit(self._handle, self._wait_and_finish, partial(self._complete, ended), may_exchange)
        return result

    def end_event_when_done(self, event: Any) -> None:
        """Ends what `begin_event` returned with the operation, before anybody can find this work completed.

        torch writes the end into the profiler's memory, which is somebody else's once that profiler has stopped.
        """
        ended: Future[None] = Future()
        # First, so that the event ends on the completer's thread: torch takes it for asynchronous only then.
        self._event_end = event._call_end_callbacks_on_future(ended)
        # `sees=False`: the error is for the thread that waits for the work, and not for this one.
        self._submit(self._handle, partial(self._handle.wait, sees=False), lambda _: ended.set_result(None), False)

    def _new_future(self) -> Future[Any]:
        return Future()

    def _complete(self, ended: Future[Any], error: BaseException | None) -> None:
        if self._event_end is not None:
            self._event_end.wait()
        ended.set_result(list(self._outputs) if error is None else f"{type(error).__name__}: {error}")

    def source_rank(self) -> int:
        """The sender of a message, once it is here. Raises RuntimeError where there is none."""
        # Negative for all but messages that have come.
        rank = self._handle.source_rank
        return rank if rank >= 0 else super().source_rank()

    _source_rank = source_rank

    def _get_duration(self) -> float:
        """Milliseconds that the operation took."""
        return self._handle.duration_s() * 1e3


@outside_dynamo
class CudaWork(EngineWork):
    """An operation on CUDA tensors: whoever waits gets his stream ordered behind the result, and runs on.

    - `wait` blocks until the engine has queued the last copy to the tensors, then orders the current stream behind it.
    - Results for tensors that are not dense are copied to them on a stream of ours, behind the engine's copies.
    - A future is completed there, too, so that torch orders everybody who waits for it behind that stream.
    - The tensors' memory may be given back, and reused, only behind the engine's copies, which no allocator knows of.
      So the call's memory is held until somebody's stream is ordered behind them, which then is told to the allocator,
      or, if nobody waits, until a later call of any group finds that they have landed.
    """

    def __init__(self, handle: Work, outputs: Sequence[Tensor], submit: Submit, memory: Memory | None) -> None:
        super().__init__(handle, outputs, submit)
        assert memory is not None
        assert memory.device is not None
        self._device = memory.device
        self._memory = self._finish = memory
        self._finishing = threading.Lock()
        # Asked now, because the memory has none left once they are queued.
        self._copies = bool(memory)
        self._copied: Any = None  # an event

    def _copy_back(self) -> None:
        """Orders the current stream behind the result, which is queued."""
        copied = self._bring_back()
        if copied is None:
            self._handle.order(torch_tools.streams.current(self._device))
        else:
            torch_tools.streams.follow(copied, self._device)
        torch_tools.streams.keep_for(self._memory.tensors(), self._device)
        # The stream of the caller is ordered behind the copies, and the allocator knows it.
        self._memory.release()

    def _bring_back(self) -> Any:
        """Queues the copies to tensors that are not dense, once; what is behind them, None where there are none."""
        if not self._copies:
            return None
        with self._finishing:
            if self._copied is None:
                with torch_tools.streams.beside(self._device) as stream:
                    self._handle.order(stream)
                    tensors = self._memory.tensors()
                    self._memory()
                    torch_tools.streams.keep_for(tensors, self._device)
                    self._copied = torch_tools.streams.record(self._device)
            return self._copied

    def is_completed(self) -> bool:
        """Return whether the operation has ended, with or without an error, and its outputs hold the result."""
        if not self._handle.is_completed() or not (self._event_end is None or self._event_end.done()):
            return False
        if self._handle.error(sees=False) is not None:
            return True
        copied = self._bring_back()
        return self._handle.has_landed() if copied is None else copied.query()

    def _wait_and_finish(self) -> None:
        self._handle.wait()

    def _new_future(self) -> Future[Any]:
        return torch_tools.streams.future([self._device])

    def _complete(self, ended: Future[Any], error: BaseException | None) -> None:
        try:
            with torch_tools.streams.beside(self._device) as stream:
                if error is None and self._bring_back() is None:
                    self._handle.order(stream)
                super()._complete(ended, error)
        except Exception as raised:  # noqa: BLE001 - handed on
            # A future that never ends would hang all that wait for it.
            if not ended.done():
                super()._complete(ended, raised)


@outside_dynamo
class JoinedWork(_Work):
    """Several operations as one: done when all are, and failed with the first error of the list."""

    def __init__(self, works: Sequence[dist.Work | None], outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._works = [work for work in works if work is not None]  # None: done when it was called
        self._outputs = outputs
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Blocks until all operations are done; raises the first error."""
        try:
            for work in self._works:
                work.wait(timeout)
        except CollectiveError:
            for work in self._works:
                # The caller gets one error for all of them, so the others must not come up later as unseen.
                work._see()  # type: ignore[attr-defined]
            raise
        if self._future is not None:
            self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether all operations have ended."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        """The first error of an operation that has ended with one."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> Future[Any]:
        """A future of the list of all output tensors."""
        with _making_future:
            future = self._future
        if future is None:
            # collect_all's future knows no devices, so nobody who waits for it is ordered behind anything. The works'
            # own were completed on the streams that are made current here.
            devices = sorted({t.device for t in self._outputs if t.is_cuda}, key=str)
            ended: Future[Any] = torch_tools.streams.future(devices) if devices else Future()

            def complete(all_ended: Future[Any]) -> None:
                value: Any = list(self._outputs)
                with contextlib.ExitStack() as stack:
                    for device in devices:
                        stack.enter_context(torch_tools.streams.beside(device))
                    try:
                        all_ended.value()  # raises the first error
                    except Exception as error:  # noqa: BLE001 - handed on
                        value = str(error)
                    ended.set_result(value)

            future = ended.then(_outputs_or_error)
            # Not under the lock: it may run callbacks, which may ask for futures.
            collect_all([work.get_future() for work in self._works]).add_done_callback(complete)
            with _making_future:
                # Another thread may have been faster, and all callers must get one future.
                future = self._future = self._future or future
        return future


def _outputs_or_error(future: Future[Any]) -> list[Tensor]:
    value: list[Tensor] | str = future.value()
    if isinstance(value, str):
        raise CollectiveError(value)
    return value
