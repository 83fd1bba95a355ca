"""Whole steps of torch's optimizers: one that calls another (ZeRO's, which steps a part with the user's) makes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class OptimizerSteps:
    """Calls `began` and `ended` with the outermost optimizer, around each step in this process, until `remove`."""

    def __init__(
        self, *, began: Callable[[Optimizer], object] = lambda _: None, ended: Callable[[Optimizer], object]
    ) -> None:
        self._began, self._ended = began, ended
        self._under_way: list[Optimizer] = []
        self._hooks = [
            register_optimizer_step_pre_hook(self._enter),
            register_optimizer_step_post_hook(self._leave),
        ]

    def remove(self) -> None:
        """No more calls."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, optimizer: Optimizer, *_: Any) -> None:
        self._forget_from(optimizer)  # a step that raised has not ended
        if not self._under_way:
            self._began(optimizer)
        self._under_way.append(optimizer)

    def _leave(self, optimizer: Optimizer, *_: Any) -> None:
        if self._forget_from(optimizer) and not self._under_way:
            self._ended(optimizer)

    def _forget_from(self, optimizer: Optimizer) -> bool:
        place = next((i for i, other in enumerate(self._under_way) if other is optimizer), None)
        if place is not None:
            del self._under_way[place:]
        return place is not None
