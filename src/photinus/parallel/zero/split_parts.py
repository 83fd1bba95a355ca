"""The parts of parameters that ranks hold, and train: what users do with them, and steps of optimizers over them.

A backward adds to the gathered parameters, which FSDP2 keeps to itself: the parts that users hold only get what the
exchange returns. So what users do with the parts is passed on from here: hooks, `zero_grad`, `p.grad = None`. And what
torch's DTensor would ignore without a word is refused.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import PhotinusError
from ...optimizer_steps import StepWatcher, watch_steps
from ..ddp.held_parameters import HeldParameters
from .split_states import is_split
from .step_facts import AVERAGED, facts_of, unaveraged_error

split_once: MutableMapping[torch.Tensor, str] = WeakIdKeyDictionary()
"""Maps each whole parameter that FSDP2 has split to the name of its part: "weight of Linear"."""

split_models: weakref.WeakSet[HeldParameters] = weakref.WeakSet()  # the parameters of each split model
_gathered: Any = WeakIdKeyDictionary()  # the parts that ranks hold -> references to Gathered
with_sums: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # split models that were inside no_sync


class Gathered:
    """The tensor in the place of one part while its unit is gathered.

    Args:
        record, group: FSDP2's own objects, for the parameter and those that are gathered with it.
        old: the parameter before `wrap`.

    Attributes:
        hooks: those of users on the gradient, one dict for the parameter before `wrap`, the part, and this tensor: so
            they get whole gradients of this rank before the exchange, as under DDP.
        watched: the gathered tensor whose gradients are noted.
    """

    def __init__(self, record: Any, group: Any, old: nn.Parameter) -> None:
        self.record, self.group = record, group
        self.hooks: Any = OrderedDict() if old._backward_hooks is None else old._backward_hooks
        self.watched: nn.Parameter | None = None
        after_sum = getattr(old, "_post_accumulate_grad_hooks", None)
        if after_sum:  # FSDP2 calls these with the part, after the exchange
            record.sharded_param._post_accumulate_grad_hooks = after_sum
        _gathered[record.sharded_param] = weakref.ref(self)
        _watch_parts()

    def has_sum(self) -> bool:
        """Return whether it has a gradient that no exchange has averaged."""
        whole = getattr(self.record, "_unsharded_param", None)
        return self.record.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)

    def drop_sum(self) -> None:
        """Forgets that gradient."""
        self.record.unsharded_accumulated_grad = None
        if hasattr(self.record, "_unsharded_param"):
            self.record._unsharded_param.grad = None


def _refuse_gradient(old: nn.Parameter, *_: object) -> NoReturn:
    raise PhotinusError(
        f"{split_once[old]} was split by photinus.wrap, and this tensor from before trains nothing. After it, take the "
        f"new ones by model.parameters(), in forward by their names, and give photinus.wrap the optimizers."
    )


class _Old(nn.Parameter):
    """A whole parameter whose parts are trained in its place. To clip or step it would change nothing."""

    grad = property(_refuse_gradient, _refuse_gradient)

    def __new__(cls, *data: Any) -> Any:
        """Return a plain parameter: a copy of an old one was never split."""
        return nn.Parameter(*data)


def note_split(before: Mapping[str, nn.Parameter], model: str) -> None:
    """Remember the whole parameters, by name, of a model that was split."""
    for name, old in before.items():
        split_once[old] = f"{name} of {model}"
        if type(old) is nn.Parameter:
            old.__class__ = _Old
        if old.requires_grad:  # a forward may use it, from an attribute of its module
            cast(Any, old)._post_accumulate_grad_hooks = OrderedDict({0: _refuse_gradient})


def groups_of(unit: nn.Module) -> list[Any]:
    """FSDP2's groups of parameters of a unit. (Older versions of torch have one, or none.)"""
    state = state_of(unit)
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def state_of(unit: Any) -> Any:
    """FSDP2's own object for a unit."""
    from torch.distributed.fsdp import fully_shard

    return cast(Any, fully_shard).state(unit)


def drop_gathered(model: torch.nn.Module) -> None:
    """Drops the gathered parameters that a forward has left in a model. They would not change with the parts."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            cast(Any, module).reshard()


# ---- what users do with the parts


def _gathered_of(part: torch.Tensor) -> Gathered | None:
    reference = _gathered.get(part)
    return reference() if reference is not None else None


def _drop_sums(parts: Iterable[torch.Tensor]) -> None:
    for part in parts:
        gathered = _gathered_of(part)
        if gathered is not None:
            gathered.drop_sum()


@functools.cache
def _watch_parts() -> None:
    """Changes what DTensors, optimizers and split models do with parts, for the whole process."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    register: Any = torch.Tensor.register_hook
    data: Any = torch.Tensor.data
    grad: Any = torch.Tensor.grad
    of_optimizer: Any = Optimizer.zero_grad
    of_model: Any = FSDPModule._apply
    reduce: Any = DTensor.__reduce_ex__

    @functools.wraps(register)
    def register_hook(tensor: Any, hook: Callable[[torch.Tensor], Any]) -> Any:
        """Lets the hook reach the gathered parameter: no backward calls what hangs on the part."""
        gathered = _gathered_of(tensor)
        if gathered is None or not tensor.requires_grad:
            return register(tensor, hook)
        handle = RemovableHandle(gathered.hooks)
        gathered.hooks[handle.id] = hook
        return handle

    def is_watched(tensor: Any) -> bool:
        return tensor in _gathered or AVERAGED in vars(tensor)

    def get_data(tensor: Any) -> torch.Tensor:
        # torch counts changes in place of what `detach` returns as changes of the tensor itself; see `StepFacts`.
        found: torch.Tensor = tensor.detach() if is_watched(tensor) else data.__get__(tensor)
        return found

    def set_data(tensor: Any, value: Any) -> None:
        """Refuses what torch's DTensor ignores without a word, but not the end of `tensor.data *= 2`."""
        if not is_watched(tensor):
            data.__set__(tensor, value)
        elif not getattr(value, "_local_tensor", value).is_set_to(tensor._local_tensor):
            raise TypeError(
                "`tensor.data = value` does not change a parameter or a gradient that is split over the ranks. Write "
                "`tensor.data.copy_(value)`; and keep its value by `tensor.detach().clone()`."
            )

    def set_grad(tensor: Any, value: torch.Tensor | None) -> None:
        """Lets `p.grad = None` drop what was added up without an exchange."""
        grad.__set__(tensor, value)
        if value is None and with_sums:
            _drop_sums([tensor])

    def reduce_ex(tensor: Any, protocol: Any) -> Any:
        """Behind pickle and torch.save."""
        if (ranks := tensor.device_mesh.size()) > 1 and not all(each.is_replicate() for each in tensor.placements):
            text = f"a tensor that is split over {ranks} ranks is pickled (by torch.save?), and this rank's part alone"
            warnings.warn(f"{text}. To save the whole, use photinus.save on all ranks, or full_tensor()", stacklevel=2)
        return reduce(tensor, protocol)

    @functools.wraps(of_optimizer)
    def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
        of_optimizer(optimizer, set_to_none)
        if with_sums:
            _drop_sums(parameter for group in optimizer.param_groups for parameter in group["params"])

    def zero_grad_of_model(model: Any, set_to_none: bool = True) -> None:
        super(FSDPModule, model).zero_grad(set_to_none)
        units: list[Any] = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        groups = (group for unit in units for group in groups_of(unit))
        _drop_sums(record.sharded_param for group in groups for record in group.fsdp_params)

    def apply(model: Any, change: Callable[[torch.Tensor], Any], recurse: bool = True) -> Any:
        """Behind .to(), .half(), ...: torch would swap each part for another tensor, also where none is needed."""
        drop_gathered(model)
        parts = [parameter for parameter in model.parameters() if parameter in _gathered]
        if not parts:
            return of_model(model, change, recurse)
        with torch.no_grad():
            if any(change(part) is not part for part in parts):
                raise TypeError("a split model keeps dtype, device and layout: call .to() and .half() before wrap")
        for buffers in (module._buffers for module in model.modules()):
            buffers.update({name: change(buffer) for name, buffer in buffers.items() if buffer is not None})
        return model

    DTensor.register_hook = register_hook  # type: ignore[method-assign]
    DTensor.data = property(get_data, set_data)  # type: ignore[assignment]
    DTensor.grad = property(grad.__get__, set_grad)  # type: ignore[assignment]
    cast(Any, DTensor).__reduce_ex__ = reduce_ex
    cast(Any, Optimizer).zero_grad = _disable_dynamo(cast(Any, zero_grad))
    cast(Any, FSDPModule).zero_grad = zero_grad_of_model
    cast(Any, FSDPModule)._apply = apply


# ---- steps over the parts, by any optimizer of this process: users make some after `wrap`


class _SplitSteps(StepWatcher):
    """Checks each step twice. The second check is for its closure, which may run a forward after a backward."""

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
    """Checks each optimizer step of this process from now on."""
    watch_steps(_split_steps)


def _unaveraged(parameters: Collection[Any]) -> list[str]:
    """Return the names of the parameters that have a gradient which no exchange has averaged. No step finds these."""
    waiting = [part for part in parameters if (gathered := _gathered_of(part)) is not None and gathered.has_sum()]
    return [holder.names[part] for part in waiting for holder in split_models if part in holder.names]


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
