"""From a plain model to one that trains in unison, and back."""

from __future__ import annotations

from typing import Any, TypeVar, overload

import torch
from torch import nn

from .session import require_session

__all__ = ["check_exchanges_gradients", "check_optimizer", "unwrap", "wrap"]

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


@overload
def wrap(model: nn.Module, *, strategy: str = ..., sync_batch_norm: bool = ..., **options: Any) -> nn.Module: ...


@overload
def wrap(
    model: nn.Module, optimizer: OptimizerT, *, strategy: str = ..., sync_batch_norm: bool = ..., **options: Any
) -> tuple[nn.Module, OptimizerT]: ...


def wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strategy: str = "ddp",
    sync_batch_norm: bool = True,
    **options: Any,
) -> nn.Module | tuple[nn.Module, torch.optim.Optimizer]:
    """Moves the model to this rank's device and makes the ranks average its gradients.

    Args:
        model: a plain module; every rank's starts with rank 0's parameters and buffers.
        optimizer: an optimizer over the model's parameters. It keeps pointing at them, and what it remembers of
            earlier steps moves to the device with them.
        strategy: a name of `photinus.parallel.STRATEGIES`: "ddp", "torch-ddp".
        sync_batch_norm: whether BatchNorm uses the statistics of the global batch instead of each rank's part.
        options: handed to the strategy, such as `bucket_cap_mb` and `find_unused_parameters`.

    Returns:
        The wrapped model, and with an optimizer the pair of both.

    Raises:
        ValueError: an unknown strategy, a model without parameters that require gradients, a model that is wrapped
            already, or an optimizer that steps other parameters than the model's.
        NotInitializedError: a launcher started several processes and `photinus.init()` was not called.
    """
    from ..parallel import wrap_model

    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, but wrap needs a torch.nn.Module")
    if unwrap(model) is not model and exchanges_gradients(model):
        raise ValueError(f"the model is wrapped already ({type(model).__name__}); give the plain model to wrap")
    if optimizer is not None:
        check_optimizer(model, optimizer)
    session = require_session("photinus.wrap")
    wrapped = wrap_model(model, strategy=strategy, sync_batch_norm=sync_batch_norm, device=session.device, **options)
    if optimizer is None:
        return wrapped
    lost = _foreign_parameters(wrapped, optimizer)
    if lost:
        raise ValueError(
            f"strategy {strategy!r} gave the model new parameters, and the optimizer still steps {lost} old ones. "
            f"Create the optimizer from the wrapped model's parameters: wrap(model), then the optimizer."
        )
    _move_state(optimizer)
    return wrapped, optimizer


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside what `wrap`, torch's DDP or torch.compile put around it."""
    while True:
        inner = getattr(model, "_orig_mod", None)  # torch.compile
        if inner is None and exchanges_gradients(model):
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def exchanges_gradients(model: nn.Module) -> bool:
    """Whether backward through this module exchanges gradients between ranks (DDP of any make, FSDP)."""
    model = getattr(model, "_orig_mod", model)
    return hasattr(model, "no_sync") or hasattr(model, "set_requires_gradient_sync")


def check_exchanges_gradients(model: nn.Module, world_size: int) -> None:
    """Refuses a plain model in a world of several ranks, which would train as many different models.

    Raises:
        ValueError: the model is not wrapped, or has nothing to train.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"the model ({type(unwrap(model)).__name__}) has no parameter that requires a gradient, so there is "
            f"nothing to train"
        )
    if world_size > 1 and not exchanges_gradients(model):
        raise ValueError(
            f"the model ({type(model).__name__}) is not wrapped, so {world_size} ranks would train {world_size} "
            f"different models. Call `model, optimizer = photinus.wrap(model, optimizer)` first."
        )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that does not step this model's parameters.

    Raises:
        ValueError: some of the optimizer's parameters are not the model's.
        TypeError: not an optimizer.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}, but a torch.optim.Optimizer is needed")
    foreign = _foreign_parameters(model, optimizer)
    if foreign:
        total = sum(len(group["params"]) for group in optimizer.param_groups)
        raise ValueError(
            f"the optimizer ({type(optimizer).__name__}) steps {total} parameters, of which {foreign} are not "
            f"parameters of the model ({type(unwrap(model)).__name__}): they would never be averaged between the "
            f"ranks. Create the optimizer from this model's parameters, after any change of the model."
        )


def _foreign_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    known = {id(parameter) for parameter in model.parameters()}
    return sum(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"])


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    """Moves what the optimizer remembers (momentum and so on) to where its parameters are now."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            # A step counter of dimension 0 lives on the host on purpose, unless the optimizer is capturable.
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != parameter.device:
                state[name] = value.to(parameter.device)
