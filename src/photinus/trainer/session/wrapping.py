"""From a plain model to one that trains in unison, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast, overload

import torch
from torch import nn

from ...parallel import DistributedDataParallel, SyncBatchNorm, strategy_of, unwrap_compiled, wrap_model
from ...parallel.exchange.agreement import check_alike
from ...parallel.exchange.collectives import resolve_group
from ..checkpoint.states import unwrap
from .replicas import describe_replicas, describe_states, plain
from .session import require_session

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


_FIT_FOR_SHARDS = ["batched_grad_copy", "bucket_cap_mb", "bucket_cap_mb_list", "check_ranks"]
_FIT_FOR_SHARDS += ["find_unused_parameters", "gradient_as_bucket_view", "init_sync"]
_ABSENT: Any = ...  # None is a mistake: wrap(model, None) would return the model alone
WRAPPED = "_photinus_wrapped"  # attribute of a wrapped model: the strategy's name and sync_batch_norm, as given


@overload
def wrap(model: nn.Module, *, strategy: str = ..., sync_batch_norm: bool = ..., **options: Any) -> nn.Module: ...


@overload
def wrap(
    model: nn.Module, optimizer: OptimizerT, *, strategy: str = ..., sync_batch_norm: bool = ..., **options: Any
) -> tuple[nn.Module, OptimizerT]: ...


@overload
def wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    second: torch.optim.Optimizer,
    *more: torch.optim.Optimizer,
    strategy: str = ...,
    sync_batch_norm: bool = ...,
    **options: Any,
) -> tuple[Any, ...]: ...


def wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer = _ABSENT,
    *more: torch.optim.Optimizer,
    strategy: str = "ddp",
    sync_batch_norm: bool = True,
    **options: Any,
) -> nn.Module | tuple[Any, ...]:
    """Move the model to this rank's device and make the ranks train it together.

        model, optimizer = photinus.wrap(model, optimizer, strategy="zero3")

    | strategy | each rank holds | from |
    |---|---|---|
    | "ddp" | everything | `photinus.DistributedDataParallel` |
    | "torch-ddp" | everything | torch's DistributedDataParallel |
    | "zero1" | parameters, gradients, its part of the optimizer state | ours, and torch's ZeroRedundancyOptimizer |
    | "zero2" | its part; all parameters from forward to backward | torch's FSDP2 |
    | "zero3" | its part; the parameters of a unit while the unit computes | torch's FSDP2 |
    | "dp" | everything: one process with several devices | torch's DataParallel |

    All strategies train the same model, and each loads the checkpoints of the others. Use the returned model, and call
    only its `forward`. Under "zero2" and "zero3" it is the same object with new parameters (this rank's parts), and all
    ranks must call it equally often. Optimizers stay the same objects, so schedulers and hooks on them stay valid.
    Other references to the old parameters, and optimizers that are not given here, do not. Under "zero2", values put
    into `model.parameters()` between a forward and its backward are lost. To average weights, use `photinus.Average`.

    Args:
        model: a plain module. All ranks start with rank 0's parameters and buffers.
        optimizer, more: optimizers of the model's parameters. Their state (momentum, ...) moves to the device and is
            split with the parameters. "zero1" needs them, and `step` sees a part there: none may compute over all
            gradients at once. Under "zero2" and "zero3", make others after `wrap`, from the new parameters.
        strategy: a name in `photinus.parallel.STRATEGIES`. Default: "ddp".
        sync_batch_norm: let BatchNorm use the statistics of the global batch, not of each rank's part. Default: True.
        options: options of the strategy. "ddp" and "zero1" take those of DistributedDataParallel, such as
            `bucket_cap_mb` and `find_unused_parameters`. "zero2" and "zero3" take `shard`: the submodules to gather and
            free as units (function or list of classes; default: blocks of the outermost ModuleLists and Sequentials).

    Returns:
        The wrapped model; with optimizers, a tuple of the model and them.

    Raises:
        ValueError: the strategy is unknown or does not fit (such as "dp" in several processes); the model is wrapped
            already, or has no parameters that require gradients; an optimizer steps parameters that are not the
            model's; or optimizers or options differ between the ranks.
        TypeError: the strategy does not have this option, or an optimizer cannot be split.
        NotInitializedError: a launcher started several processes, and `photinus.init()` was not called.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, but wrap needs a torch.nn.Module")
    if (unwrap(model) is not model and exchanges_gradients(model)) or strategy_of(model).splits(model):
        raise ValueError(f"the model is wrapped already ({type(model).__name__}); give the plain model to wrap")
    optimizers = [each for each in (optimizer, *more) if each is not _ABSENT]
    for each in optimizers:
        check_optimizer(model, each)
    session = require_session("photinus.wrap")
    group = resolve_group(options.get("process_group"), options.get("device_mesh"))
    if session.logical_shards:
        _check_fits_shards(model, strategy, options)
    given = {"strategy": strategy, "sync_batch_norm": sync_batch_norm, **{n: plain(v) for n, v in options.items()}}
    alike = {**given, **describe_replicas([model], optimizers), **describe_states(optimizers)}
    check_alike(alike, "the ranks were given different things to wrap", group)
    wrapped = wrap_model(
        model, optimizers, strategy=strategy, sync_batch_norm=sync_batch_norm and not session.logical_shards,
        device=session.device, **options,
    )  # fmt: skip
    if session.logical_shards:
        cast(DistributedDataParallel, wrapped).add_in_shards(session.logical_shards)
    for each in optimizers:
        assert not _foreign_parameters(wrapped, each), f"strategy {strategy!r} lost parameters of an optimizer"
        _move_state(each)
    vars(unwrap_compiled(wrapped))[WRAPPED] = {"strategy": strategy, "sync_batch_norm": sync_batch_norm}
    return (wrapped, *optimizers) if optimizers else wrapped


def _check_fits_shards(model: nn.Module, strategy: str, options: Mapping[str, Any]) -> None:
    """Refuses what depends on the number of ranks, with logical_shards.

    Raises:
        ValueError: names it.
    """
    if strategy not in ("ddp", "zero1"):
        raise ValueError(f"strategy={strategy!r} adds gradients by ranks: with logical_shards, use 'ddp' or 'zero1'")
    unfit = sorted(set(options) - {*_FIT_FOR_SHARDS})
    if unfit:
        raise ValueError(f"{', '.join(unfit)}: no option for logical_shards; there are {', '.join(_FIT_FOR_SHARDS)}")
    for name, module in model.named_modules():
        if isinstance(module, (nn.SyncBatchNorm, SyncBatchNorm)) or getattr(module, "sparse", False):
            kind, use = type(module).__name__, "sparse=False" if hasattr(module, "sparse") else "nn.BatchNorm"
            raise ValueError(f"{name} ({kind}) exchanges by ranks, which logical_shards excludes: use {use}")


def exchanges_gradients(model: nn.Module) -> bool:
    """Return whether backward through this module exchanges gradients between ranks (any DDP, FSDP)."""
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


def check_second_models(model: nn.Module, others: Mapping[str, Any], world_size: int) -> None:
    """Refuses a second optimizer whose parameters are not averaged between the ranks, such as a discriminator's.

    A model that no optimizer steps, as an average of the weights, may be plain.

    Args:
        others: what a loop saves beside its model and optimizer, by name.

    Raises:
        ValueError: some of the parameters are in no wrapped model.
    """
    plain = {f"state[{name!r}]": each for name, each in others.items() if isinstance(each, nn.Module)}
    wrapped = [part for each in (model, *plain.values()) for part in each.modules() if exchanges_gradients(part)]
    averaged = {id(parameter) for each in wrapped for parameter in each.parameters()}
    for name, optimizer in others.items() if world_size > 1 else ():
        groups = getattr(optimizer, "param_groups", ())
        alone = [p for group in groups for p in group["params"] if p.requires_grad and id(p) not in averaged]
        if alone:
            owners = (f"{where} ({type(m).__name__})" for where, m in plain.items() if alone[0] in set(m.parameters()))
            raise ValueError(
                f"state[{name!r}] ({type(optimizer).__name__}) steps {len(alone)} parameters of "
                f"{next(owners, 'none of the models given to the loop')}, which nothing averages: {world_size} ranks "
                f"would train {world_size} different models. Wrap that model with its optimizer, `second, "
                f"second_optimizer = photinus.wrap(second, second_optimizer)`, and give both in state=..."
            )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that does not step this model's parameters.

    Raises:
        ValueError: some of the optimizer's parameters are not the model's.
        TypeError: not an optimizer.
    """
    if not hasattr(optimizer, "param_groups"):
        what = "None" if optimizer is None else f"a {type(optimizer).__name__}"
        raise TypeError(f"optimizer is {what}, but a torch.optim.Optimizer is needed (or none: photinus.wrap(model))")
    foreign = _foreign_parameters(model, optimizer)
    if foreign:
        total = sum(len(group["params"]) for group in optimizer.param_groups)
        raise ValueError(
            f"the optimizer ({type(optimizer).__name__}) steps {total} parameters, of which {foreign} are not "
            f"parameters of the model ({type(unwrap(model)).__name__}): they would never be averaged between the "
            f"ranks. Create the optimizer from this model's parameters, after any change of the model."
        )


def check_schedulers(state: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuses a scheduler over another optimizer, such as one made before: no learning rate here would ever change.

    Raises:
        ValueError: it sets the rates of none of these.
    """
    known = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    for scheduler in state.values():
        over = getattr(scheduler, "optimizer", None)
        # Of a scheduler without an optimizer it is not known where it sets rates.
        if isinstance(over, torch.optim.Optimizer) and not any(id(group) in known for group in over.param_groups):
            raise ValueError(
                f"the scheduler ({type(scheduler).__name__}) sets the learning rate of a different "
                f"{type(over).__name__}, not of the loop's optimizer, whose rate would stay as it is: make the "
                f"scheduler again, over this optimizer (or give the other one in state=...)"
            )


def _foreign_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    known = {id(parameter) for parameter in model.parameters()}
    return sum(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"])


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    """Moves what the optimizer remembers (momentum and so on) to where its parameters are now."""
    on_device = [g for g in optimizer.param_groups if g.get("fused") or g.get("capturable")]
    counted_on_device = {id(parameter) for group in on_device for parameter in group["params"]}
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            # A step counter of dimension 0 lives on the host on purpose, unless the optimizer's kernels count.
            moves = isinstance(value, torch.Tensor) and (value.dim() > 0 or id(parameter) in counted_on_device)
            if moves and value.device != parameter.device:
                state[name] = value.to(parameter.device)
