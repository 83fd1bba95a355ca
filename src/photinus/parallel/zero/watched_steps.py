"""Steps over split models, by any optimizer of this process: users make some after `wrap`."""

from __future__ import annotations

import weakref
from collections.abc import Collection, MutableMapping
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import PhotinusError
from ...optimizer_steps import StepWatcher, watch_steps
from ..ddp.held_parameters import HeldParameters
from .split_states import is_split
from .step_facts import facts_of, unaveraged_error

split_once: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
"""Whole parameters whose parts are trained now, by the names that these have: "weight of Linear"."""

_parts: weakref.WeakKeyDictionary[HeldParameters, list[Any]] = weakref.WeakKeyDictionary()

split_models: weakref.WeakSet[HeldParameters] = weakref.WeakSet()  # by their parameters


def drop_gathered(model: torch.nn.Module) -> None:
    """Drops gathered parameters wherever a forward left some: they would not see what changes the parts now."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            cast(Any, module).reshard()


class _SplitSteps(StepWatcher):
    """Looks at each step before it, and after it, for its closure may have a forward behind a backward."""

    def step_began(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        parameters = _look(optimizer)
        if not has_closure and (unaveraged := _unaveraged(parameters)):
            raise unaveraged_error(optimizer, unaveraged)
        for facts in facts_of(parameters):
            if facts.is_split:
                facts.begin_step(optimizer)

    def step_ended(self, optimizer: Optimizer) -> None:
        for facts in facts_of(_look(optimizer)):
            if facts.is_split:
                facts.end_step(optimizer)


_split_steps = _SplitSteps()


def watch_split_models() -> None:
    """Looks at each step from now on."""
    watch_steps(_split_steps)


def _unaveraged(parameters: Collection[Any]) -> list[str]:
    """The names of those with whole gradients, of backwards that no exchange has averaged: no step finds them."""
    waiting = [
        (holder, each.sharded_param)
        for holder in split_models
        if holder.has_any(parameters)
        for each in _parts_of(holder)
        if each.unsharded_accumulated_grad is not None
        or ((whole := getattr(each, "_unsharded_param", None)) is not None and whole.grad is not None)
    ]
    own = set(parameters) if waiting else set()
    return [holder.names[part] for holder, part in waiting if part in own]


def _parts_of(holder: HeldParameters) -> list[Any]:
    """torch's objects for the parameters that it gathers."""
    found = _parts.get(holder)
    if found is None:
        units = [cast(Any, unit) for unit in holder._module.modules() if hasattr(unit, "_get_fsdp_state")]
        states = [unit._get_fsdp_state() for unit in units]
        # torch 2.15 has several groups in a unit.
        groups = [getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states]
        found = [each for some in groups for group in some if group is not None for each in group.fsdp_params]
        _parts[holder] = found
    return found


def _look(optimizer: Optimizer) -> list[Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in (p for p in parameters if not is_split(p)):
        gathered = (holder.names[parameter] for holder in split_models if parameter in holder.names)
        name = split_once.get(parameter) or next(gathered, None)
        if name:
            raise PhotinusError(
                f"{type(optimizer).__name__}.step() would train nothing of {name}: made before photinus.wrap and "
                f"not given to it, or between a forward and its backward. Write photinus.wrap(model, optimizer, ...)."
            )
    for holder in [holder for holder in split_models if holder.has_any(parameters)]:
        drop_gathered(holder._module)
    return parameters
