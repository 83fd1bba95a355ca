"""The interface of every strategy: a small set of verbs.

A trainer knows these verbs and two rules, and nothing else. Every verb is called by all ranks, in the same order, for
any of them may exchange. And what it trains is the module that `wrap` returned, by the optimizers that were given to
`wrap`, which stay the objects that they were. Where parameters, gradients and optimizer states lie meanwhile, when
gradients are averaged and over what, is the strategy's own affair, so that it may change without any trainer noticing.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from ...words import hint
from ..exchange.collectives import resolve_group
from ..zero.split_states import copy_state, gather_state


class Strategy(ABC):
    """One way of spreading a model over the ranks, with verbs that trainers and loops call.

    A strategy holds options, not models: one object can wrap several models, and the verbs find all they need in the
    model or optimizer that they are given. `photinus.parallel.STRATEGIES` lists the strategies.

    Raises:
        TypeError: an option that this strategy does not have; the message lists those it has.

    Attributes:
        name: what users write.
        accepted: names of the options.
        forward_exchanges: whether a forward, in evaluation too, exchanges with the other ranks, so that all ranks have
            to make the same number of them.
        replicates: whether every rank holds all parameters, equal on all ranks between two steps.
    """

    name: ClassVar[str]
    accepted: ClassVar[frozenset[str]] = frozenset()
    forward_exchanges: ClassVar[bool] = False
    replicates: ClassVar[bool] = False

    def __init__(self, **options: Any) -> None:
        for option in options:
            if option not in self.accepted:
                there = f"there are {', '.join(sorted(self.accepted))}" if self.accepted else "there are none"
                raise TypeError(
                    f"strategy {self.name!r} has no option {option!r}; {there}.{hint(option, self.accepted, show=repr)}"
                )
        self.options = options

    @property
    def has_group(self) -> bool:
        """Return whether the options name the ranks that train together: a process group or a mesh of one dimension."""
        return any(self.options.get(name) is not None for name in ("process_group", "device_mesh"))

    @property
    def group(self) -> dist.ProcessGroup:
        """Those ranks; the default group where no option names any. Raises as `resolve_group` does."""
        return resolve_group(self.options.get("process_group"), self.options.get("device_mesh"))

    # -- setting up --------------------------------------------------------------------------------------------------

    def check(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:  # noqa: B027 - most have no wishes
        """Refuses, before anything is changed or exchanged, what `wrap` could not do. Raises ValueError, TypeError."""

    @abstractmethod
    def wrap(self, model: nn.Module, device: torch.device, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """The module to train instead of `model`, which is on `device` already; every rank's starts as rank 0's.

        Args:
            model: the plain model; changed in place.
            device: where this rank computes.
            optimizers: over the model's parameters. They are changed in place, so that they step the parameters that
                the returned module has: object, class, defaults, groups and hooks stay, and so do schedulers made over
                them, before or after.
        """

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """The user's model, with plain names; its parameters may be this rank's parts (see `save`)."""
        return cast(nn.Module, wrapped.module) if self.recognizes(wrapped) else wrapped

    # -- training ----------------------------------------------------------------------------------------------------

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """A context in which forward and backward accumulate gradients without averaging them.

        The next backward outside averages the sums. Raises TypeError when this strategy did not wrap the model.
        """
        self._require_made(wrapped)
        return cast("AbstractContextManager[None]", cast(Any, wrapped).no_sync())

    def clip(self, wrapped: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients down so that their norm, over all parameters of the whole model, is at most `max_norm`.

        Called after the last backward before a step; with a GradScaler, after its `unscale_`.

        Returns:
            The norm before, shape [], equal on all ranks.
        """
        return torch.nn.utils.clip_grad_norm_(self.unwrap(wrapped).parameters(), max_norm, norm_type)

    # -- states ------------------------------------------------------------------------------------------------------

    def save(self, part: nn.Module | Optimizer) -> dict[str, Any]:
        """The state of a wrapped model or of an optimizer, whole and plain, on rank 0. Called by all ranks.

        It is what `state_dict` of the plain model, or of a plain optimizer over the plain model, would return: full
        tensors, the user's names, parameters numbered in the order of the groups. So it loads under every strategy,
        at every world size, and in plain torch. What other ranks get is of no use.
        """
        return cast("dict[str, Any]", gather_state(self.local_state(part)))

    def load(self, part: nn.Module | Optimizer, state: Mapping[str, Any]) -> None:
        """Puts back what `save` returned, the same whole state on every rank, or this rank's `local_state`.

        Raises what `load_state_dict` raises; then a part of it may have been loaded (see `keep`).
        """
        target = self.unwrap(part) if isinstance(part, nn.Module) else part
        target.load_state_dict(copy_state(state) if isinstance(part, Optimizer) else cast("dict[str, Any]", state))

    def local_state(self, part: nn.Module | Optimizer) -> dict[str, Any]:
        """Return this rank's part of a state, without an exchange and without a copy."""
        return (self.unwrap(part) if isinstance(part, nn.Module) else part).state_dict()

    def keep(self, part: nn.Module | Optimizer) -> Callable[[], None]:
        """Copies what this rank holds (to the CPU); calling what it returns puts that back. Exchanges nothing."""
        state = copy_state(self.local_state(part), device=torch.device("cpu"))
        return lambda: self.load(part, state)

    def splits(self, part: nn.Module | Optimizer) -> bool:
        """Return whether this rank holds only a part of this state, so that `save` needs all ranks."""
        return False

    # -- recognising -------------------------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def recognizes(cls, part: nn.Module | Optimizer) -> bool:
        """Return whether a model or optimizer looks as this strategy's `wrap` returns them."""

    def _require_made(self, wrapped: nn.Module) -> None:
        if not self.recognizes(wrapped):
            raise TypeError(f"strategy {self.name!r} did not wrap this {type(wrapped).__name__}")


def explain_errors(wrapped: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """Returns the model, which adds what to do to errors of a forward that do not say it."""

    def explain(*_: Any) -> None:
        error = sys.exc_info()[1]  # the hook of a forward that fails is called while its error is handled
        if isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error):
            advice = (
                "Only the forwards of the model and of its units gather parameters: choose units by wrap(shard=...)."
            )
        elif error is not None and group not in dist.distributed_c10d._world.pg_map:
            advice = (
                "The model was wrapped in a photinus.init() that has ended: wrap a new one, and load the saved state."
            )
        else:
            return
        error.args = (f"{error}\n{advice}",)

    wrapped.register_forward_hook(_disable_dynamo(explain), always_call=True)
    return wrapped
