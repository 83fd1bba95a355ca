"""An optimizer that was made over one set of parameters, changed in place so that it steps another.

It stays the same object of the same class, with its defaults, group options, step counts, hooks and schedulers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..exchange.tensors import tensors_in


def check_repointable(optimizers: Sequence[Optimizer], strategy: str) -> None:
    """Refuses optimizers that would go on stepping the old parameters, or that mix values of different parameters."""
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"strategy {strategy!r} has to change what the optimizer steps, and {kind} is no "
                f"torch.optim.Optimizer, so where it keeps its parameters is not known. "
                'Give the torch optimizer inside it, or take "ddp".'
            )
        # LBFGS does, and others that compute with all parameters as one long vector.
        holding = [name for name, value in vars(optimizer).items() if name not in _KNOWN and _holds(value, optimizer)]
        if holding:
            raise TypeError(
                f"strategy {strategy!r} cannot split {kind}: it keeps parameters in its attribute {holding[0]!r} "
                f"beside param_groups, as optimizers do that compute with all parameters at once. Take an optimizer "
                f'that steps each parameter by itself, or strategy="ddp".'
            )


def repoint(
    optimizer: Optimizer,
    new_of: Mapping[torch.Tensor, torch.Tensor],
    new_state: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Makes the optimizer step `new_of[p]` wherever it stepped `p`.

    Args:
        new_of: the new parameter for each of the optimizer's.
        new_state: `new_state(value, parameter)`: what becomes of a tensor that the optimizer remembers, of one
            dimension or more, for the new parameter. (One without dimensions, such as a step count, stays.)
    """
    for group in optimizer.param_groups:
        group["params"] = [new_of[parameter] for parameter in group["params"]]
    before = dict(optimizer.state)
    optimizer.state.clear()
    for old, remembered in before.items():
        new = new_of[old] if isinstance(old, torch.Tensor) else old
        optimizer.state[new] = {
            name: new_state(value, new) if isinstance(value, torch.Tensor) and value.dim() else value
            for name, value in remembered.items()
        }


_KNOWN = frozenset({"param_groups", "state", "defaults"})


def _holds(value: Any, optimizer: Optimizer) -> bool:
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(tensor) in own for tensor in tensors_in(value))
