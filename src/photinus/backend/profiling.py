"""Collectives in torch.profiler's timeline: "photinus:all_reduce" and so on, from the call to the exchange's end."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd import profiler

from .. import engine
from .completer import Submit
from .name import NAME

_OPERATION_NAMES = {code: name for name, code in engine.OPERATIONS.items()}
is_on = torch._C._autograd._profiler_enabled
"""Whether a profiler is on."""
_record_function: Any = profiler.record_function


def begin(operation: str) -> Any:
    """Starts an event and returns it, or returns None when no profiler is on (which costs 0.1 microseconds)."""
    return _record_function(f"{NAME}:{operation}").__enter__() if is_on() else None


def begin_call(call: engine.Call) -> Any:
    """The same for a collective."""
    return begin(_OPERATION_NAMES[call.operation]) if is_on() else None


def end(event: Any) -> None:
    """Ends what `begin` returned."""
    if event is not None:
        event.__exit__(None, None, None)


def end_with(event: Any, handle: engine.Work, submit: Submit) -> None:
    """Ends the event with the operation, on another thread: that is what makes it asynchronous in the timeline.

    torch 2.11 leaves such events out.
    """
    submit(handle, partial(handle.wait, sees=False), lambda _: end(event), False)
