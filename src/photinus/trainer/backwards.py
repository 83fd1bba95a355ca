"""Which gradients a loop made: a step on others is an error, for they lack their weight, and the log their loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..errors import PhotinusError
from ..optimizer_steps import OptimizerSteps
from ..parallel.zero.split_states import is_split

_SURE_BODIES = 100


class Backwards:
    """Counts the backwards of a loop, and which of them each optimizer has used.

    Args:
        optimizers: whose steps are looked at while a body runs.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._steps: OptimizerSteps | None = None
        self._bodies = 0  # without a step; -1 once one was seen
        self._watched = False  # while a body of the loop runs
        self._stepped = False  # any optimizer, in this body or after it
        self._settled = 0  # backwards made up to the end of the last body with a step
        self._made = 0
        self._used = [0] * len(optimizers)
        for place, optimizer in enumerate(optimizers):
            if hasattr(optimizer, "register_step_post_hook"):
                optimizer.register_step_pre_hook(partial(self._before_step, place))
                optimizer.register_step_post_hook(partial(self._after_step, place))

    @property
    def unstepped(self) -> bool:
        """Whether gradients add up for a step in a later body. What comes after a body's step, or belongs to another
        optimizer than the one that made it, does not: as in a GAN, whose two optimizers take turns in each body."""
        return self._made > self._settled

    def begin(self) -> None:
        """Bodies begin. From now on steps count that are made for one of the optimizers, too: of wrappers that have
        one inside, as SAM and Lookahead do, no hook runs."""
        if self._steps is None:
            self._steps = OptimizerSteps(ended=self._note_inner_step)

    def end(self) -> None:
        """Bodies are over. May be called again."""
        if self._steps is not None:
            self._steps.remove()
            self._steps = None

    def unseen(self, bodies: int) -> bool:
        """Whether so many bodies, and at least 100, have ended and no step was ever seen. Then none will be."""
        return self._bodies >= max(bodies, _SURE_BODIES)

    def body_began(self) -> None:
        """The loop hands out a batch."""
        self._watched, self._stepped = True, False

    def body_ended(self) -> None:
        """The body came to its end, or was left."""
        self._watched = False
        if self._stepped:
            self._settled = self._made
            self._bodies = -1
        elif self._bodies >= 0:
            self._bodies += 1

    def add(self) -> None:
        """One more backward is made."""
        self._made += 1

    def _before_step(
        self, place: int, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if len(args) < 2 and kwargs.get("closure") is None:  # a closure has its backward inside the step
            self._check(place, optimizer)

    def _after_step(self, place: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._check(place, optimizer)
        self._used[place] = self._made
        self._stepped = True

    def _note_inner_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not any(optimizer is each for each in self._optimizers):
            stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            self._stepped |= any(
                id(parameter) in stepped
                for each in self._optimizers
                for group in each.param_groups
                for parameter in group["params"]
            )

    def _check(self, place: int, optimizer: torch.optim.Optimizer) -> None:
        if self._watched and self._made == self._used[place] and _has_gradients(optimizer):
            raise PhotinusError(
                f"{type(optimizer).__name__}.step() found gradients that loop.backward did not make. In the body of a "
                f"Loop, write loop.backward(loss) in place of loss.backward(), and loop.backward(loss, scaler=scaler) "
                f"in place of scaler.scale(loss).backward(): the loop gives a short last batch its right weight, and "
                f"logs the loss. Gradients that you make in another way: multiply the loss by loop.weight, and call "
                f"loop.record(loss) before the step."
            )


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step would use any: those that zero_grad(set_to_none=False) left are none."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None:
                gradient = gradient.to_local() if is_split(gradient) else gradient
                if gradient.is_sparse or bool(gradient.any()):
                    return True
    return False
