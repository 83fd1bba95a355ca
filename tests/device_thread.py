"""Backward on a thread of autograd's own, as for a GPU: below its hooks there is no frame of Python.

On CPU tensors autograd runs hooks on the thread that called `backward`, so what a test finds there says nothing of
GPUs: the thread is another one, and `sys._getframe(1)` in what C++ calls raises ValueError.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

__all__ = ["backward_as_for_a_gpu", "call_without_frames"]

_starting = threading.Lock()


def call_without_frames(function: Callable[[], Any]) -> Any:
    """Calls a function that is not written in Python, on a thread that runs nothing else; its result or error."""
    ended = threading.Lock()
    ended.acquire()
    returned: deque[Any] = deque()
    raised: list[BaseException] = []
    calls: Iterable[Any] = map(partial.__call__, [partial(function), partial(ended.release)])
    start, before = returned.extend, sys.unraisablehook

    def keep(unraisable: Any) -> None:
        if unraisable.object is not start:
            before(unraisable)
            return
        raised.append(unraisable.exc_value)
        ended.release()

    with _starting:
        sys.unraisablehook = keep
        try:
            _thread.start_new_thread(start, (calls,))
            ended.acquire()
        finally:
            sys.unraisablehook = before
    if raised:
        raise raised[0]
    return returned[0]


class _Engine:
    """autograd's engine, for torch.autograd.Variable: nested backwards stay on their thread, as for a GPU."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *arguments: Any, **options: Any) -> Any:
        run = partial(self._engine.run_backward, *arguments, **options)
        return run() if torch._C._current_graph_task_id() != -1 else call_without_frames(run)


def backward_as_for_a_gpu() -> None:
    """From now on all backwards of this process run as for a GPU."""
    variable: Any = torch.autograd.Variable
    if not isinstance(variable._execution_engine, _Engine):
        variable._execution_engine = _Engine(variable._execution_engine)
