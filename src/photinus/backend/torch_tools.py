"""Show a group to torch's own tools: torch.profiler sees each call as an event, torch.compile nothing.

Events ("photinus:all_reduce" and so on) last from the call to the exchange's end.
"""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch.autograd import profiler

from .. import engine
from .completer import Submit
from .name import NAME

Class = TypeVar("Class", bound=type)

_OPERATION_NAMES = {code: name for name, code in engine.OPERATIONS.items()}
profiler_is_on = torch._C._autograd._profiler_enabled
"""True while a profiler is on."""
_record_function: Any = profiler.record_function


def outside_dynamo(cls: Class) -> Class:
    """Keeps torch.compile out of all methods that the class itself defines: they hand addresses to native code.

    Dynamo traces into a process group's Python methods when a compiled region calls `dist.*` directly, and fails on the
    objects it meets there. `torch.compiler.disable` prevents that but imports Dynamo (a second or more) and wraps every
    call. The two marks that it leaves work alone: an attribute for calls that Dynamo would inline, and a skip in the
    frame evaluator for frames that run while it listens, the frames below included.
    """
    # Own methods only: a base class marks its own.
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and name != "__init__":
            setattr(cls, name, _mark(method))
    return cls


def _mark(method: FunctionType) -> Any:
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # a torch without them: the wrapper it is
        return torch._disable_dynamo(method)  # type: ignore[attr-defined]
    # Twice: for this frame, and for those that it calls.
    set_code_exec_strategy(method.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    method._torchdynamo_disable = True  # type: ignore[attr-defined]
    method._torchdynamo_disable_msg = "a collective of backend photinus"  # type: ignore[attr-defined]
    return method


def begin_event(operation: str) -> Any:
    """Starts an event and returns it, or returns None when no profiler is on (which costs 0.1 microseconds)."""
    return _record_function(f"{NAME}:{operation}").__enter__() if profiler_is_on() else None


def begin_call(call: engine.Call) -> Any:
    """The same for a collective."""
    return begin_event(_OPERATION_NAMES[call.operation]) if profiler_is_on() else None


def end_event(event: Any) -> None:
    """Ends what `begin_event` returned."""
    if event is not None:
        event.__exit__(None, None, None)


def end_event_with(event: Any, handle: engine.Work, submit: Submit) -> None:
    """Ends the event with the operation, on another thread: that is what makes it asynchronous in the timeline.

    torch 2.11 leaves such events out.
    """
    # `sees=False`: the error is for the thread that waits for the work, and not for this one.
    submit(handle, partial(handle.wait, sees=False), lambda _: end_event(event), False)
