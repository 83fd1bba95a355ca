"""The strategies by name, the call that makes a model ready for one, and what is asked of models of any of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...words import hint
from ..ddp.ddp import DistributedDataParallel
from ..ddp.sync_batch_norm import convert_sync_batchnorm
from ..exchange.agreement import place_in_group
from ..exchange.collectives import resolve_group
from ..exchange.verify_models import compare_parameters
from ..zero.step_facts import StepFacts, facts_of
from .ddp import DDPStrategy, DPStrategy, TorchDDPStrategy, Zero1Strategy
from .fully_sharded import Zero2Strategy, Zero3Strategy
from .strategy import Strategy

STRATEGIES: Mapping[str, type[Strategy]] = MappingProxyType(
    {
        strategy.name: strategy
        for strategy in (DDPStrategy, TorchDDPStrategy, DPStrategy, Zero1Strategy, Zero2Strategy, Zero3Strategy)
    }
)
"""Every strategy by the name that users write."""

_LOOKED_AT = (Zero3Strategy, DDPStrategy, TorchDDPStrategy, Zero1Strategy, DPStrategy)
"""The order in which `strategy_of` asks. A model of "zero2" is found as one of "zero3", which has the same verbs."""


def find_strategy(name: str) -> type[Strategy]:
    """The strategy of that name.

    Raises:
        ValueError: there is none; the message lists those there are, and the closest.
    """
    found = STRATEGIES.get(name)
    if found is not None:
        return found
    near = hint(str(name).lower().replace("_", "-"), STRATEGIES, show=repr, cutoff=0.5)
    raise ValueError(f"unknown strategy {name!r}; there are {', '.join(map(repr, STRATEGIES))}.{near}")


def strategy_of(part: nn.Module | Optimizer) -> Strategy:
    """The strategy whose verbs fit a wrapped model or an optimizer, told by what it is, whoever wrapped it.

    A plain model or optimizer, and any wrapper that is not known, gets that of one process.
    """
    looked_at = unwrap_compiled(part) if isinstance(part, nn.Module) else part
    return next((cls() for cls in _LOOKED_AT if cls.recognizes(looked_at)), DPStrategy())


def is_replicated(model: nn.Module, world_size: int) -> bool:
    """Return whether all ranks hold all parameters of a model, and always the same."""
    group = getattr(model, "process_group", None)
    if not getattr(model, "check_ranks", True):
        return False
    return strategy_of(model).replicates and (group is None or group.size() == world_size)


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """The model that torch.compile was called with, where it was called around a wrapped one; else the model itself."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def wrap_model(
    model: nn.Module,
    optimizers: Sequence[Optimizer] = (),
    *,
    strategy: str = "ddp",
    sync_batch_norm: bool = True,
    device: torch.device,
    **options: Any,
) -> nn.Module:
    """Moves a model to its device, converts its batch norms where asked, and wraps it. Called on every rank.

    Raises:
        ValueError: unknown strategy, a model without parameters that require grad, or one that the strategy does not
            suit.
        TypeError: an option that the strategy does not have.
        NotInitializedError: there is no process group.
    """
    wrapper = find_strategy(strategy)(**options)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no parameter that requires grad, so there is nothing to train. Unfreeze some, "
            f"or use the model unwrapped."
        )
    wrapper.check(model, optimizers)
    model = model.to(device)
    if sync_batch_norm:
        model = convert_sync_batchnorm(model, wrapper.group if wrapper.has_group else None)
    return wrapper.wrap(model, device, optimizers)


def step_facts_of(models: Iterable[nn.Module]) -> list[StepFacts]:
    """Return what is noted of the steps of models that ranks step in parts ("zero1", "zero2", "zero3"), in order."""
    found = [facts for model in models for facts in facts_of(model.parameters())]
    return list(dict.fromkeys(found))


def compare_ranks(models: Iterable[nn.Module], when: str) -> None:
    """Compares weights that all ranks hold (by digests: one read of them) and the steps that ranks made; all call it.

    Models that were wrapped with check_ranks=False and plain ones are left out.

    Args:
        when: begins the message, as in "before saving x.pt ".

    Raises:
        ModelMismatchError: they differ; on all ranks, says where.
    """
    if (world_size := place_in_group()[1]) == 1:
        return
    wrapped = [unwrap_compiled(model) for model in models]
    for facts in step_facts_of(wrapped):
        facts.compare(saving=True)
    for model in wrapped:
        if is_replicated(model, world_size):
            ignored: set[str] = getattr(model, "parameters_to_ignore", set())
            pairs = strategy_of(model).unwrap(model).named_parameters()
            compare_parameters([(n, p.detach()) for n, p in pairs if n not in ignored], resolve_group(None), when)
    for model in (each for each in wrapped if isinstance(each, DistributedDataParallel)):
        model.reducer.facts.compare(1)  # as after the first exchange: steps, and gradients that were left over
