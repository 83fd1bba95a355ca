"""Steps of optimizers over split models, of all in this process, because users make some after `wrap`.

Each step drops what a forward gathered. One that would train nothing raises.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any, cast

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import PhotinusError
from ..ddp.held_parameters import HeldParameters
from .split_states import is_split

split_once: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
"""Whole parameters whose parts are trained now, by the names that these have: "weight of Linear"."""

_watched: MutableMapping[HeldParameters, Callable[[Optimizer], None]] = weakref.WeakKeyDictionary()
_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def watch_steps(held: HeldParameters, check: Callable[[Optimizer], None]) -> None:
    """Watches the steps over a split model from now on. `check(optimizer)` raises where one cannot step it."""
    _watched[held] = check
    _register_hooks()


def drop_gathered(model: nn.Module) -> None:
    """Drops gathered parameters wherever a forward left some: they would not see what changes the parts now."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            cast(Any, module).reshard()


@functools.cache
def _register_hooks() -> None:
    register_optimizer_step_pre_hook(_disable_dynamo(_before_step))
    register_optimizer_step_post_hook(_disable_dynamo(_after_step))  # for a forward in the step's closure


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for parameter in (p for group in optimizer.param_groups for p in group["params"] if not is_split(p)):
        told, why = split_once.get(parameter), "made before photinus.wrap and not given to it"
        if told is None:
            told = next((held.names[parameter] for held in _watched if parameter in held.names), None)
            why = "made between a forward and its backward, when parameters are gathered"
        if told is not None:
            raise PhotinusError(
                f"{type(optimizer).__name__}.step() would train nothing: it was {why}, so it does not have this rank's "
                f"part of {told}. Give the optimizer to wrap: model, optimizer = photinus.wrap(model, optimizer, ...); "
                f"or make it right after that, from model.parameters()."
            )
    stepped = _drop(optimizer)
    if optimizer not in _checked:
        for check in stepped:
            check(optimizer)
        _checked.add(optimizer)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    _drop(optimizer)


def _drop(optimizer: Optimizer) -> list[Callable[[Optimizer], None]]:
    """Drops what is gathered of the models that an optimizer steps; returns their checks."""
    parameters = {p for group in optimizer.param_groups for p in group["params"]}
    stepped = {held: check for held, check in _watched.items() if held.has_any(parameters)}
    for held in stepped:
        drop_gathered(held.module)
    return list(stepped.values())
