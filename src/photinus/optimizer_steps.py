"""Watch the steps of all torch optimizers in this process: a watcher is called when a step begins and when it ends.

An optimizer may step through another, as ZeRO's steps a part with the user's, or through the `step` of its base class.
That is one step, the outermost one's. Watchers are called on the thread that steps. A step that raises has begun and
does not end. Compiled steps call watchers too: torch.compile does not trace the calls from here.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_STEP = Optimizer.profile_hook_step(lambda _: None).__code__  # of what torch puts around the `step` of each class

_watchers: list[weakref.ref[StepWatcher]] = []


class StepWatcher:
    """The base class of what watches steps."""

    def step_began(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """An optimizer begins to step. With a closure, backwards may follow inside the step."""

    def step_ended(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""


def watch_steps(watcher: StepWatcher) -> None:
    """Call a watcher at each step from now on, as long as it lives. Earlier watchers are called first."""
    _watch_torch()
    if watcher not in _present():
        _watchers.append(weakref.ref(watcher, _watchers.remove))


def unwatch_steps(watcher: StepWatcher) -> None:
    """Stop calling a watcher. May be called again."""
    with contextlib.suppress(ValueError):
        _watchers.remove(weakref.ref(watcher))


@functools.cache
def _watch_torch() -> None:
    """Registers the hooks, which stay: a watcher may go while torch walks through its hooks, and none may go then."""
    register_optimizer_step_pre_hook(_untraced(_began))
    register_optimizer_step_post_hook(_untraced(_ended))


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that torch.compile does not trace, and that costs nothing in steps that are not compiled."""
    disabled = _disable_dynamo(hook)
    return lambda *args: (disabled if is_dynamo_compiling() else hook)(*args)


def _began(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if _is_outermost():
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        for watcher in _present():
            watcher.step_began(optimizer, has_closure=closure is not None)


def _ended(optimizer: Optimizer, *_: Any) -> None:
    if _is_outermost():
        for watcher in _present():
            watcher.step_ended(optimizer)


def _is_outermost() -> bool:
    # The frames tell, and not a count of calls: of a step that raised, torch does not tell the end.
    frame: FrameType | None = sys._getframe(3)
    steps = 0
    while frame is not None and steps < 2:
        steps += frame.f_code is _STEP
        frame = frame.f_back
    return steps < 2


def _present() -> list[StepWatcher]:
    return [watcher for watcher in [each() for each in [*_watchers]] if watcher is not None]
