"""The strategies by name, and the one call that makes a model ready for them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from .ddp_strategy import DDPStrategy
from .strategy import Strategy
from .sync_batch_norm import convert_sync_batchnorm
from .torch_ddp_strategy import TorchDDPStrategy

__all__ = ["STRATEGIES", "find_strategy", "wrap_model"]

STRATEGIES: Mapping[str, type[Strategy]] = MappingProxyType(
    {strategy.name: strategy for strategy in (DDPStrategy, TorchDDPStrategy)}
)
"""Every strategy by the name that users write."""


def find_strategy(name: str) -> type[Strategy]:
    """The strategy of that name.

    Raises:
        ValueError: there is none; the message lists those there are, and the closest.
    """
    found = STRATEGIES.get(name)
    if found is not None:
        return found
    close = difflib.get_close_matches(str(name).lower().replace("_", "-"), STRATEGIES, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown strategy {name!r}; there are {', '.join(map(repr, STRATEGIES))}.{hint}")


def wrap_model(
    model: nn.Module, *, strategy: str = "ddp", sync_batch_norm: bool = True, device: torch.device, **options: Any
) -> nn.Module:
    """Moves a model to its device, converts its batch norms where asked, and wraps it. Called on every rank.

    Args:
        model: the plain model; it is changed in place.
        strategy: a name in STRATEGIES.
        sync_batch_norm: whether batch norms use the statistics of the global batch (see `SyncBatchNorm`).
        device: where the rank trains.
        options: passed on to the strategy (`process_group`, `find_unused_parameters`, ...).

    Raises:
        ValueError: unknown strategy, or a model without parameters that require grad.
        NotInitializedError: there is no process group.
    """
    chosen = find_strategy(strategy)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has no parameter that requires grad, so there is nothing to train. Unfreeze some, "
            f"or use the model unwrapped."
        )
    model = model.to(device)
    if sync_batch_norm:
        model = convert_sync_batchnorm(model, options.get("process_group"))
    return chosen(**options).wrap(model, device)
