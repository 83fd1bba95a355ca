"""The units of split models: their choice, and what is watched in their forwards and backwards.

Beside torch's FSDP2, which gathers a unit before it computes: losses that outputs do not show, the order of the units,
writes into parameters and second gradients, which would be lost.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, cast

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import PhotinusError
from ..exchange.tensors import tensors_in
from .split_parts import Gathered, groups_of, state_of
from .split_states import is_split

Shard = Callable[[nn.Module], bool] | Sequence[type[nn.Module]] | None

SMALLEST_UNIT_ELEMS = 1 << 16
"""Of the default rule. Gathering less costs more in the exchange than dropping it saves in memory."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_ORDER = "photinus_unit_order"
_MASK = (1 << 53) - 1  # a float64 carries it
_HOOKED = "photinus_hooked"  # on a tensor whose backward gathers first
_LENGTH, _MOST = 256, 10_000  # of an attribute, and values of an output, that are searched for tensors
_OF_MODULES = frozenset(vars(nn.Module()))
_OPAQUE = (str, bytes, int, float, complex, range, type, types.ModuleType, types.FunctionType, nn.Module, torch.device)


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
        modules = [module for module in model.modules() if isinstance(module, tuple(shard))]
    elif callable(shard) and not isinstance(shard, type):
        modules = [module for module in model.modules() if shard(module)]
    else:
        raise TypeError(
            f"shard={shard!r}: needs a list of module classes, or a function that takes a module and returns "
            "whether it is a unit"
        )
    if not modules:
        what = "none of its classes is in" if isinstance(shard, (list, tuple)) else "the function chose no submodule of"
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(f"shard: {what} the model ({type(model).__name__}); it has modules of {', '.join(kinds[:12])}")
    if container := next((type(each).__name__ for each in modules if isinstance(each, _CONTAINERS)), None):
        raise ValueError(f"shard: a {container} has no forward, so it cannot be a unit; choose the modules inside it")
    return modules


def _elems(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shares(module: nn.Module, model: nn.Module) -> bool:
    """Return whether a parameter inside is also registered outside."""
    inside = set(module.modules())
    own = {id(parameter) for parameter in module.parameters()}
    outside = (other for other in model.modules() if other not in inside)
    return any(id(parameter) in own for other in outside for parameter in other.parameters(recurse=False))


# ---- forwards and backwards


def unit_order(model: nn.Module) -> int:
    """A digest of the units that the forwards of a split model have used so far, in their order; 0 for other models.

    Ranks gather in the order of their forwards, so they have to use the same ones.
    """
    return int(vars(model).get(_ORDER, 0))


def refuse_renorm(model: nn.Module, strategy: str) -> None:
    """Refuses embeddings that scale their rows in forward, where that would be lost. Raises ValueError."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"strategy {strategy!r}: {name or 'the model'} ({type(module).__name__}) has max_norm, by which "
                f"forward writes into its weight on each rank alone. Leave max_norm out, and scale the weight after "
                f"steps."
            )


@dataclass
class _UnitNotes:
    """The notes on one unit.

    Attributes:
        number: in the order of all.
        gathered: its parameters.
        parameters: (full name, module, name), of the modules that are in no unit inside it.
        keepers: those modules that may keep a loss. Torch's own layers, the most of a model, keep none.
        versions: of the parameters, at the beginning of the forward.
    """

    number: int
    gathered: list[Gathered]
    parameters: list[tuple[str, nn.Module, str]]
    keepers: list[nn.Module]
    versions: dict[str, tuple[int, int]] = field(default_factory=dict)

    def versions_now(self) -> dict[str, tuple[int, int]]:
        found = {}
        for name, module, key in self.parameters:
            parameter = module._parameters.get(key)
            if parameter is not None and not is_split(parameter) and not parameter.is_inference():
                found[name] = (parameter._version, parameter.data_ptr())
        return found


class SplitUnits:
    """Watches the units of a model that FSDP2 has split: made right after `fully_shard`.

    Args:
        units: the inner ones before those around them.
        new_of: the part for each parameter that the model had.
        learn: called with each gathered parameter that is new, and its part.

    Attributes:
        hides_loss: whether the last training forward returned nothing to start a backward from, and none came yet.
        watchers: called with each part whose gathered tensor gets a gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        strategy: str,
        new_of: Mapping[torch.Tensor, torch.Tensor],
        learn: Callable[[nn.Parameter, nn.Parameter], Any],
    ) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        self.hides_loss = False
        self.watchers: list[Callable[[nn.Parameter], None]] = []
        self._model, self._strategy, self._learn = model, strategy, learn
        self._after_exchange = TrainingState.POST_BACKWARD
        vars(model)[_ORDER] = 0
        old_of: Any = WeakIdKeyDictionary({new: old for old, new in new_of.items()})
        for number, unit in enumerate(units):
            gathered = [
                Gathered(record, group, old_of[record.sharded_param])
                for group in groups_of(unit)
                for record in group.fsdp_params
            ]
            inner = [module for module in unit.modules() if module is not unit and module in units]
            inside = {part for module in inner for part in module.modules()}
            own = [(path, module) for path, module in unit.named_modules() if module not in inside]
            names = [(f"{path}.{name}".lstrip("."), each, name) for path, each in own for name in each._parameters]
            keepers = [module for _, module in own if not type(module).__module__.startswith("torch.nn.")]
            notes = _UnitNotes(number, gathered, names, keepers)
            # After FSDP2's hook that gathers, and before the one that drops.
            unit.register_forward_pre_hook(_disable_dynamo(partial(self._begin, notes)))
            unit.register_forward_hook(_disable_dynamo(partial(self._end, notes)), prepend=True)
        model.register_forward_hook(_disable_dynamo(partial(_refuse_graphs, strategy)))

    def _begin(self, notes: _UnitNotes, unit: nn.Module, _: Any) -> None:
        """The unit is gathered."""
        vars(self._model)[_ORDER] = (unit_order(self._model) * 1000003 + notes.number + 1) & _MASK
        notes.versions = notes.versions_now()
        for each in notes.gathered:
            parameter = each.record._unsharded_param
            if parameter._backward_hooks is not each.hooks:
                parameter._backward_hooks = each.hooks
                self._learn(parameter, each.record.sharded_param)
            if parameter.requires_grad and each.watched is not parameter:
                each.watched = parameter
                state, group = weakref.ref(state_of(unit)), weakref.ref(each.group)
                note = partial(self._note, state, group, each.record.sharded_param)
                parameter.register_post_accumulate_grad_hook(note)

    def _note(self, state_of: Any, group_of: Any, part: nn.Parameter, _: torch.Tensor) -> None:
        """A gradient came, so there will be an exchange, wherever the backward began."""
        self.hides_loss = False
        state, group = state_of(), group_of()
        if group._training_state is self._after_exchange:  # which went without this gradient
            group._training_state = type(self._after_exchange).IDLE
        if not state._state_ctx.post_backward_final_callback_queued:
            state._register_root_post_backward_final_callback()
        for watcher in self.watchers:
            watcher(part)

    def _end(self, notes: _UnitNotes, unit: nn.Module, _: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            self._show_losses(notes, unit, output)
        now, versions, notes.versions = notes.versions_now(), notes.versions, {}
        changed = [name for name, version in versions.items() if now.get(name, version) != version]
        if changed:
            raise PhotinusError(
                f"this forward wrote into {changed[0]}, which strategy {self._strategy!r} has gathered for the time of "
                f"the forward: what is written is lost. Do it between two steps, under torch.no_grad(), or take "
                f'strategy="ddp".'
            )

    def _show_losses(self, notes: _UnitNotes, unit: nn.Module, output: Any) -> None:
        """Lets each tensor from which a backward may come gather the unit first, as FSDP2 does for those it finds."""
        visible, hidden = _search(output)
        is_trained = any(each.watched is not None for each in notes.gathered)
        if is_trained and not any(tensor.requires_grad for tensor in visible + hidden):
            self.hides_loss = True  # the loss is anywhere, so nothing could gather the unit in time
            cast(Any, unit).set_reshard_after_forward(False, recurse=False)
        for module in notes.keepers:
            for name in vars(module).keys() - _OF_MODULES:
                value = vars(module)[name]
                if isinstance(value, torch.Tensor):
                    hidden.append(value)
                elif isinstance(value, (list, tuple, dict)) and len(value) < _LENGTH:
                    items = value.values() if isinstance(value, dict) else value
                    hidden += [item for item in items if isinstance(item, torch.Tensor)]
        state = state_of(unit)
        for tensor in hidden:
            if tensor.grad_fn is not None and _HOOKED not in vars(tensor):
                vars(tensor)[_HOOKED] = True
                tensor.register_hook(state._pre_backward)  # type: ignore[no-untyped-call]


def _refuse_graphs(strategy: str, _: nn.Module, __: Any, output: Any) -> None:
    def refuse(_: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise PhotinusError(
                f"this backward has create_graph=True (as a gradient penalty), and the gradient of a gradient needs "
                f'parameters that strategy {strategy!r} has dropped by then: take strategy="ddp" or "zero1".'
            )

    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(refuse)  # type: ignore[no-untyped-call]


def _search(value: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """List the tensors in a value: those that FSDP2 finds, which looks into plain containers only, and the others."""
    visible, hidden = list[torch.Tensor](), list[torch.Tensor]()
    todo, ids = deque([(value, visible)]), set[int]()
    for _ in range(_MOST):
        if not todo:
            break
        value, found = todo.popleft()
        if isinstance(value, torch.Tensor):
            found.append(value)
        if value is None or isinstance(value, (torch.Tensor, *_OPAQUE)) or id(value) in ids:
            continue
        ids.add(id(value))
        items: Iterable[Any]
        if type(value) is dict:
            items = value.values()
        elif type(value) in (list, tuple) or hasattr(value, "_fields"):
            items = value
        else:
            found = hidden
            slots = (name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()))
            parts = [getattr(value, "__dict__", {}).values(), (getattr(value, name, None) for name in slots)]
            if isinstance(value, Mapping):
                parts.append(value.values())
            elif isinstance(value, (Set, Sequence)):
                parts.append(value)
            items = chain.from_iterable(parts)
        todo.extend((item, found) for item in islice(items, _MOST))
    return visible, hidden
