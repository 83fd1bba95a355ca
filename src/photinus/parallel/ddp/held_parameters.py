"""The parameters that a wrapper averages: no other wrapper averages them too, and none comes or goes later."""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import PhotinusError, UnsuitableModelError
from .torch_surface import TorchDDP, TorchSurface


class HeldParameters:
    """Remembers the parameters of a module that require grad, and notices when the module has other ones.

    Args:
        ignored: names of parameters that are left alone.

    Attributes:
        names: the names by parameter.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str] = ()) -> None:
        self._module = module
        self._ignored = ignored
        self.names = {p: name for name, p in self._named() if p.requires_grad}
        self._frozen = {p for _, p in self._named() if not p.requires_grad}
        self._frozen_later: list[nn.Parameter] = []
        self._look()

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._module.named_parameters() if name not in self._ignored]

    def _look(self) -> None:
        self._modules = list(self._module.modules())
        self._last_parts = self._parts()

    def _parts(self) -> list[object]:
        # Listing the parameters by name costs ten times as much, and this is done in each step.
        parts: list[object] = []
        for module in self._modules:
            parts += module._parameters.values()
            parts += module._modules.values()
        return parts

    def learn(self, parameter: nn.Parameter, known: nn.Parameter) -> None:
        """Takes a tensor that at times stands in for a parameter (FSDP's gathered one) by that parameter's name."""
        if known in self.names:
            self.names[parameter] = self.names[known]

    def _is_unchanged(self) -> bool:
        parts = self._parts()
        return len(parts) == len(self._last_parts) and all(map(operator.is_, parts, self._last_parts))

    def has_any(self, parameters: Collection[Any]) -> bool:
        """Return whether any of these is the module's."""
        return any(p in self.names or p in self._frozen for p in parameters)

    def check(self, rank: int) -> None:
        """Compares the parameters with those at the beginning.

        Raises:
            UnsuitableModelError: names those that came, vanished or were replaced.
        """
        if self._is_unchanged() and not any(p.requires_grad for p in self._frozen_later):
            return
        now = self._named()
        if not all(isinstance(p, nn.Parameter) for _, p in now):
            return  # torch.func.functional_call puts other tensors in their places for a while
        there = {self.names.get(p) for _, p in now}
        new = [(name, p) for name, p in now if p not in self.names and p not in self._frozen]
        came = [name for name, p in new if p.requires_grad]
        absent = [name for name in dict.fromkeys(self.names.values()) if name not in there]
        if came or absent:
            replaced = [name for name in came if name in absent]
            came, absent = [n for n in came if n not in replaced], [n for n in absent if n not in replaced]
            changes = ((came, "came"), (absent, "vanished"), (replaced, "replaced by another tensor"))
            text = "; ".join(f"{', '.join(names[:5])} ({len(names)} {how})" for names, how in changes if names)
            raise UnsuitableModelError(
                f"rank {rank}: the parameters of {type(self._module).__name__} changed after it was wrapped: {text}. "
                f"Gradients of new parameters are not averaged, so the ranks would drift apart. Wrap after you changed "
                f"the model (layers put in, load_state_dict(assign=True), …), and make the optimizer after that, too."
            )
        self._frozen_later = [p for _, p in new]
        self._look()


def take_over_parameters(wrapper: nn.Module, own: Mapping[nn.Parameter, str]) -> None:
    """Makes other wrappers, ours and torch's, that average some of these parameters raise when they are used to train.

    A gradient lies in one wrapper's bucket. Another one would read it while the average arrives there.

    Args:
        wrapper: the one that averages the parameters from now on.
        own: their names in it.

    Raises:
        UnsuitableModelError: one of the others is inside this one, or around it. (Of two of ours, the outer one
            averages for both.)
    """
    kinds: list[type] = [TorchDDP, TorchSurface]
    for kind in kinds:  # which grows: subclasses of subclasses
        kinds += kind.__subclasses__()
    # torch's class keeps no list of its objects. (A set, since a process may have millions of them; of numbers, since a
    # metaclass may forbid hash().)
    ids = {id(kind) for kind in kinds}
    for other in [each for each in gc.get_objects() if id(type(each)) in ids]:
        if other is wrapper or "reducer" not in vars(other):
            continue  # without a reducer: its construction failed
        shared = {p: name for name, p in _trained_by(other) if p in own}
        if not shared:
            continue
        first = next(iter(shared))
        text = (
            f"parameter {own[first]} of {_name(wrapper)} belongs to {_name(other)} too, as {shared[first]} "
            f"({len(shared)} in all), but only one of them can average it: "
        )
        around = other.modules() if isinstance(wrapper, TorchSurface) else ()
        is_inside = any(m is other for m in wrapper.modules())
        are_ours = isinstance(wrapper, TorchSurface) and isinstance(other, TorchSurface)
        if is_inside and are_ours and len(shared) == len(other.reducer.slots):
            other._outer = weakref.ref(wrapper)
            other.reducer.give_up(shared, f"{text}the outer one did, and is gone: wrap the model again")
            continue
        if is_inside or any(m is wrapper for m in around):
            raise UnsuitableModelError(f"{text}wrap the outer module, and nothing inside it")
        text += "wrap one module that holds both, or use the one that was made last"
        if isinstance(other, TorchSurface):
            other.reducer.give_up(shared, text)
        else:
            other.register_forward_pre_hook(partial(_refuse_training, text))


def _refuse_training(text: str, *_: object) -> None:
    if torch.is_grad_enabled():
        raise PhotinusError(text)


def _trained_by(wrapper: Any) -> list[tuple[str, nn.Parameter]]:
    if isinstance(wrapper, TorchSurface):
        return [(slot.name, slot.parameter) for slot in wrapper.reducer.slots]
    return [(n, p) for n, p in wrapper.module.named_parameters() if n not in wrapper.parameters_to_ignore]


def _name(wrapper: Any) -> str:
    cls = type(wrapper)
    if not isinstance(wrapper, TorchSurface) and TorchDDP not in cls.__mro__:
        return cls.__name__
    return f"the {cls.__module__.partition('.')[0]} {cls.__name__} of {type(wrapper.module).__name__}"
