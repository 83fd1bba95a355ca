"""Gradients of split models up to their exchange: hooks on parameters, losses that outputs do not show, sums to drop.

A backward adds to the gathered parameters, which FSDP2 keeps to itself: the parts that users hold only get what the
exchange returns. So what users do with the parts is passed on from here.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import chain, islice
from typing import Any, cast

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from .shard_units import own_modules

_HOOKED = "photinus_hooked"  # on a tensor whose backward gathers first
_LENGTH, _MOST = 256, 10_000  # of an attribute, and values of an output, that are searched for tensors
_OF_MODULES = frozenset(vars(nn.Module()))
_OPAQUE = (str, bytes, int, float, complex, range, type, types.ModuleType, types.FunctionType, nn.Module, torch.device)

_gathered: Any = WeakIdKeyDictionary()  # the parts that ranks hold -> references to _Gathered
_with_sums: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # split models that have been inside no_sync


class _Gathered:
    """The tensor in the place of one part while its unit is gathered.

    Attributes:
        hooks: those of users on the gradient, one dict for the parameter before `wrap`, the part, and this tensor: so
            they get whole gradients of this rank before the exchange, as under DDP.
    """

    def __init__(self, record: Any, old: nn.Parameter, group: Any) -> None:
        self.record, self.group = record, group
        self.hooks: Any = OrderedDict() if old._backward_hooks is None else old._backward_hooks
        self.watched: nn.Parameter | None = None
        after_sum = getattr(old, "_post_accumulate_grad_hooks", None)
        if after_sum:  # FSDP2 calls these with the part, after the exchange
            record.sharded_param._post_accumulate_grad_hooks = after_sum

    def drop_sum(self) -> None:
        self.record.unsharded_accumulated_grad = None
        if hasattr(self.record, "_unsharded_param"):
            self.record._unsharded_param.grad = None


class SplitGradients:
    """Watches the units of a model that FSDP2 has split: made right after `fully_shard`.

    Args:
        new_of: the part for each parameter that the model had.
        learn: called with each gathered parameter that is new, and its part.

    Attributes:
        hides_loss: whether the last training forward returned nothing to start a backward from, and none came yet.
        watchers: called with each part whose gathered tensor gets a gradient.
    """

    def __init__(
        self,
        units: Sequence[nn.Module],
        new_of: Mapping[torch.Tensor, torch.Tensor],
        learn: Callable[[nn.Parameter, nn.Parameter], Any],
    ) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        self.hides_loss = False
        self._after_exchange = TrainingState.POST_BACKWARD
        self.watchers: list[Callable[[nn.Parameter], None]] = []
        self._learn = learn
        old_of: Any = WeakIdKeyDictionary({new: old for old, new in new_of.items()})
        for unit in units:
            # Torch's own layers, the most of a model, keep no losses.
            own = [each for each in own_modules(unit, units) if not type(each).__module__.startswith("torch.nn.")]
            gathered = [
                _Gathered(record, old_of[record.sharded_param], group)
                for group in _groups(unit)
                for record in group.fsdp_params
            ]
            _gathered.update({each.record.sharded_param: weakref.ref(each) for each in gathered})
            unit.register_forward_pre_hook(_disable_dynamo(partial(self._begin, gathered)))
            unit.register_forward_hook(_disable_dynamo(partial(self._end, gathered, own)), prepend=True)
        _pass_hooks_on()
        _drop_sums_in_zero_grad()

    def _begin(self, of_unit: list[_Gathered], unit: nn.Module, _: Any) -> None:
        """The unit is gathered."""
        for each in of_unit:
            parameter = each.record._unsharded_param
            if parameter._backward_hooks is not each.hooks:
                parameter._backward_hooks = each.hooks
                self._learn(parameter, each.record.sharded_param)
            if parameter.requires_grad and each.watched is not parameter:
                each.watched = parameter
                state, group = weakref.ref(_state_of(unit)), weakref.ref(each.group)
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

    def _end(self, of_unit: list[_Gathered], own: Iterable[nn.Module], unit: nn.Module, _: Any, output: Any) -> None:
        """Lets each tensor from which a backward may come gather the unit first, as FSDP2 does for those it finds."""
        if not torch.is_grad_enabled():
            return
        visible, hidden = _search(output)
        if not any(t.requires_grad for t in visible + hidden) and any(each.watched is not None for each in of_unit):
            self.hides_loss = True  # the loss is anywhere, so nothing could gather the unit in time
            cast(Any, unit).set_reshard_after_forward(False, recurse=False)
        for module in own:
            for name in vars(module).keys() - _OF_MODULES:
                value = vars(module)[name]
                if isinstance(value, torch.Tensor):
                    hidden.append(value)
                elif isinstance(value, (list, tuple, dict)) and len(value) < _LENGTH:
                    items = value.values() if isinstance(value, dict) else value
                    hidden += [item for item in items if isinstance(item, torch.Tensor)]
        state = _state_of(unit)
        for tensor in hidden:
            if tensor.grad_fn is not None and _HOOKED not in vars(tensor):
                vars(tensor)[_HOOKED] = True
                tensor.register_hook(state._pre_backward)  # type: ignore[no-untyped-call]


def note_sums(model: nn.Module) -> None:
    """Before a forward of a split model inside no_sync: `zero_grad` has more to drop from now on."""
    _with_sums.add(model)


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


def _state_of(unit: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return cast(Any, fully_shard).state(unit)


def _groups(unit: nn.Module) -> list[Any]:
    """FSDP2's groups of parameters of a unit. (Older versions of torch have one, or none.)"""
    state = _state_of(unit)
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _gathered_of(part: torch.Tensor) -> _Gathered | None:
    reference = _gathered.get(part)
    return reference() if reference is not None else None


@functools.cache
def _pass_hooks_on() -> None:
    """Lets `register_hook` of a part reach the gathered parameter: no backward calls what hangs on the part."""
    from torch.distributed.tensor import DTensor

    of_tensor: Any = torch.Tensor.register_hook

    @functools.wraps(of_tensor)
    def register_hook(tensor: Any, hook: Callable[[torch.Tensor], Any]) -> Any:
        gathered = _gathered_of(tensor)
        if gathered is None or not tensor.requires_grad:
            return of_tensor(tensor, hook)
        handle = RemovableHandle(gathered.hooks)
        gathered.hooks[handle.id] = hook
        return handle

    DTensor.register_hook = register_hook  # type: ignore[method-assign]


@functools.cache
def _drop_sums_in_zero_grad() -> None:
    """Lets `zero_grad` of optimizers and models, and `p.grad = None`, drop what was added up without an exchange."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    of_tensor: Any = torch.Tensor.grad
    set_in_torch = of_tensor.__set__
    of_optimizer: Any = Optimizer.zero_grad

    @functools.wraps(of_optimizer)
    def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
        of_optimizer(optimizer, set_to_none)
        if _with_sums:
            _drop_sums(parameter for group in optimizer.param_groups for parameter in group["params"])

    def zero_grad_of_model(model: Any, set_to_none: bool = True) -> None:
        super(FSDPModule, model).zero_grad(set_to_none)
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                groups = _groups(cast(nn.Module, unit))
                _drop_sums(record.sharded_param for group in groups for record in group.fsdp_params)

    def set_grad(tensor: Any, value: torch.Tensor | None) -> None:
        set_in_torch(tensor, value)
        if value is None and _with_sums:
            _drop_sums([tensor])

    DTensor.grad = property(of_tensor.__get__, set_grad)  # type: ignore[assignment]
    cast(Any, Optimizer).zero_grad = _disable_dynamo(cast(Any, zero_grad))
    cast(Any, FSDPModule).zero_grad = zero_grad_of_model


def _drop_sums(parts: Iterable[torch.Tensor]) -> None:
    for part in parts:
        gathered = _gathered_of(part)
        if gathered is not None:
            gathered.drop_sum()
