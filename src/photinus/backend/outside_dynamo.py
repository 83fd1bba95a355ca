"""Keeps torch.compile out of code that hands addresses to native code.

Dynamo traces into a process group's Python methods when a compiled region calls `dist.*` directly, and fails on the
objects it meets there. `torch.compiler.disable` prevents that but imports Dynamo (a second or more) and wraps every
call. The two marks that it leaves work alone: an attribute for calls that Dynamo would inline, and a skip in the frame
evaluator for frames that run while it listens, the frames below included.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

Class = TypeVar("Class", bound=type)


def outside_dynamo(cls: Class) -> Class:
    """Marks all methods that the class itself defines."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and name != "__init__":
            setattr(cls, name, _mark(method))
    return cls


def _mark(method: FunctionType) -> Any:
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:  # a torch without them: the wrapper it is
        return torch._disable_dynamo(method)  # type: ignore[attr-defined]
    set_code_exec_strategy(method.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    method._torchdynamo_disable = True  # type: ignore[attr-defined]
    method._torchdynamo_disable_msg = "a collective of backend photinus"  # type: ignore[attr-defined]
    return method
