"""Steps over split models, by any optimizer of this process: users make some after `wrap`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import MutableMapping
from typing import Any, cast

import torch
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import PhotinusError
from ..ddp.held_parameters import HeldParameters
from .split_states import is_split

split_once: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
"""Whole parameters whose parts are trained now, by the names that these have: "weight of Linear"."""

split_models: weakref.WeakSet[HeldParameters] = weakref.WeakSet()  # by their parameters


def drop_gathered(model: torch.nn.Module) -> None:
    """Drops gathered parameters wherever a forward left some: they would not see what changes the parts now."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            cast(Any, module).reshard()


@functools.cache
def watch_steps() -> None:
    """Looks at each step from now on: before it, and after it, for its closure may have a forward behind a backward."""
    register_optimizer_step_pre_hook(_disable_dynamo(_look))
    register_optimizer_step_post_hook(_disable_dynamo(_look))


def _look(optimizer: Optimizer, *_: Any) -> None:
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
