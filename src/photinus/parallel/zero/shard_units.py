"""The choice of submodules that are sharded, gathered and dropped as units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

Shard = Callable[[nn.Module], bool] | Sequence[type[nn.Module]] | None

SMALLEST_UNIT_ELEMS = 1 << 16
"""Of the default rule. Gathering less costs more in the exchange than dropping it saves in memory."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def shard_units(model: nn.Module, shard: Shard = None) -> list[nn.Module]:
    """The submodules that are units; the inner ones before those around them, the model itself not among them.

    What lies in no unit travels with the model itself: it is gathered before the first layer and kept to the last.
    A submodule that shares a parameter with something outside it is no unit, so that tied weights stay tied.

    Args:
        model: not sharded yet.
        shard: a function of a module that says whether it is a unit, or a list of classes that are. Default, for
            Transformers and other stacks of blocks: the children of every outermost ModuleList or Sequential (the
            blocks), if they have SMALLEST_UNIT_ELEMS parameters or more.

    Raises:
        TypeError: `shard` is neither.
        ValueError: it chose none, or a ModuleList or ModuleDict, which has no forward.
    """
    modules = _by_default(model) if shard is None else _by_rule(model, shard)
    units = [module for module in modules if module is not model and _elems(module) and not _shares(module, model)]
    # Each once: stacks may share a block. fully_shard wants what is inside first, which has fewer modules.
    return sorted(dict.fromkeys(units), key=lambda unit: len(list(unit.modules())))


def own_modules(unit: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of a unit that are in no unit inside it."""
    modules = list(unit.modules())
    inside = {part for other in units if other is not unit and other in modules for part in other.modules()}
    return [module for module in modules if module not in inside]


def _by_default(model: nn.Module) -> list[nn.Module]:
    blocks = [block for stack in _stacks_in(model, set()) for block in stack.children()]
    return [block for block in blocks if not isinstance(block, _CONTAINERS) and _elems(block) >= SMALLEST_UNIT_ELEMS]


def _stacks_in(module: nn.Module, visits: set[nn.Module]) -> Iterator[nn.Module]:
    """The outermost stacks of blocks, each once."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and module not in visits:
        yield module
    elif module not in visits:
        visits.add(module)
        for child in module.children():
            yield from _stacks_in(child, visits)
    visits.add(module)


def _by_rule(model: nn.Module, shard: Shard) -> list[nn.Module]:
    if isinstance(shard, (list, tuple)) and all(isinstance(cls, type) and issubclass(cls, nn.Module) for cls in shard):
        classes = tuple(shard)
        modules = [module for module in model.modules() if isinstance(module, classes)]
    elif callable(shard) and not isinstance(shard, type):
        modules = [module for module in model.modules() if shard(module)]
    else:
        raise TypeError(
            f"shard={shard!r}: needs a list of module classes, or a function that takes a module and returns "
            "whether it is a unit"
        )
    if not modules:
        what = "none of its classes" if isinstance(shard, (list, tuple)) else "no submodule"
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"shard: {what} is in the model ({type(model).__name__}); it has modules of {', '.join(kinds[:12])}"
            if isinstance(shard, (list, tuple))
            else f"shard: the function chose {what} of the model ({type(model).__name__}), which has {', '.join(kinds)}"
        )
    for module in modules:
        if isinstance(module, _CONTAINERS):
            raise ValueError(
                f"shard: a {type(module).__name__} has no forward, so it cannot be a unit; choose the modules inside it"
            )
    return modules


def _elems(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shares(module: nn.Module, model: nn.Module) -> bool:
    """Return whether a parameter inside is also registered outside."""
    inside = set(module.modules())
    own = {id(parameter) for parameter in module.parameters()}
    outside = (other for other in model.modules() if other not in inside)
    return any(id(parameter) in own for other in outside for parameter in other.parameters(recurse=False))
