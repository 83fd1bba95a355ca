"""Spans that a profiler shows of a training step, beside operators and kernels: forward, backward, each exchange.

Any torch.profiler shows these spans; `photinus.trace` is one that also learns where steps begin. While no profiler is
on, a span costs one question.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from operator import methodcaller
from typing import Any, cast

import torch
from torch.futures import Future
from torch.profiler import record_function

from ..exchange.collectives import Pending
from ..exchange.tensors import tensors_in

profiler_is_on: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""True while a profiler is on."""

future_of: Callable[[Any], Any] = methodcaller("get_future")
"""A work's future, for callbacks that start no collective: backend photinus looks for calls of this name."""

_follower: Callable[[], object] | None = None
_forward: Any = None


def follow_steps(call: Callable[[], object] | None) -> None:
    """`call` is called at the beginning of each step of this process from now on; None ends that."""
    global _follower
    _follower = call


def is_followed() -> bool:
    """Return whether somebody follows the steps of this process."""
    return _follower is not None


def span(name: str) -> AbstractContextManager[object]:
    """A profiler shows the block as `name`."""
    return record_function(name) if profiler_is_on() else nullcontext()


def forward_began() -> None:
    """A forward that an exchange will follow begins, and with it a step, which lasts until the next one."""
    global _forward
    if _follower is not None:
        _follower()
    _forward = span("forward")
    _forward.__enter__()


def forward_ended(outputs: object) -> None:
    """The forward has returned these outputs; a profiler shows the backward that comes by them."""
    global _forward
    began, _forward = _forward, None
    if began is not None:
        began.__exit__(None, None, None)
    if not profiler_is_on():
        return
    begun: list[Any] = []

    def reached(gradient: torch.Tensor) -> None:
        # A backward that comes by several outputs is one backward.
        if not begun:
            begun.append(span("backward"))
            begun[0].__enter__()
            torch.autograd.Variable._execution_engine.queue_callback(ended)

    def ended() -> None:
        # With an exchange, its callback was queued later and has not run yet: backward is over now.
        begun.pop().__exit__(None, None, None)

    tensor: Any
    for tensor in tensors_in(outputs):
        if tensor.requires_grad:
            tensor.register_hook(reached)


class _WithSpan:
    """An exchange, and the end of the span by which a profiler shows it."""

    def __init__(self, work: Pending, end: Future[Any]) -> None:
        self._work = work
        self._end = end

    def wait(self) -> None:
        """Blocks until the operation is done; raises what went wrong."""
        try:
            self._work.wait()
        finally:
            # torch writes the end into the profiler's memory, which is somebody else's once that profiler has stopped.
            if self._work.is_completed():
                with suppress(Exception):  # the error of the operation, which the work raises
                    self._end.wait()

    def is_completed(self) -> bool:
        """Return whether a wait would return or raise immediately."""
        return self._work.is_completed() and self._end.done()


def until_done(name: str, start: Callable[[], Pending]) -> Pending:
    """Starts an exchange and returns its work. A profiler shows it as `name` until it has ended.

    Of a work without a future (a backend may have none) it shows the start.
    """
    if not profiler_is_on():
        return start()
    with record_function(name) as event:
        work: Any = start()
        try:
            future = future_of(work)
        except (AttributeError, RuntimeError):
            return cast(Pending, work)
        return _WithSpan(work, event._call_end_callbacks_on_future(future))
