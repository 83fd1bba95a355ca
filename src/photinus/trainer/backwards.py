"""Which gradients a loop made: a step on others is an error, for they lack their weight, and the log their loss.

Each step is also noted for the comparison of the ranks: its options, whether gradients of the last step were kept, and
which parts of parameters something else has changed since (torch counts changes in place): no other rank has a copy of
these to compare with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ..errors import PhotinusError
from ..optimizer_steps import OptimizerSteps
from ..parallel.zero.split_states import is_split
from .session.replicas import Replicas

_SURE_BODIES = 100


class Backwards:
    """Counts the backwards of a loop, and which of them each optimizer has used.

    Args:
        optimizers: whose steps are looked at while a body runs.
        replicas: takes what is noted of each step.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], replicas: Replicas) -> None:
        self._optimizers = optimizers
        self._replicas = replicas
        self._step = 0  # of the loop
        # By optimizer, from its last step: a parameter whose gradient it used; whether this gradient was still there at
        # the next backward; and its split parameters, with the changes that they had seen.
        self._witnesses: dict[int, torch.Tensor] = {}
        self._kept: dict[int, bool] = {}
        self._versions: dict[int, list[tuple[torch.Tensor, int]]] = {}
        self._steps: OptimizerSteps | None = None
        self._bodies = 0  # without a step; -1 once one was seen
        self._watched = False  # while a body of the loop runs
        self._stepped = False  # any optimizer, in this body or after it
        self._settled = 0  # backwards made up to the end of the last body with a step
        self._made = 0
        self._used = [0] * len(optimizers)
        self.rate: Any = None  # of the first optimizer's last step: its scheduler may have moved on since
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

    def body_began(self, step: int) -> None:
        """The loop hands out the batch of a step."""
        self._watched, self._stepped, self._step = True, False, step

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
        for place, parameter in self._witnesses.items():
            self._kept.setdefault(place, parameter.grad is not None)

    def _before_step(
        self, place: int, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if place == 0:
            rate = optimizer.param_groups[0].get("lr")
            self.rate = rate.clone() if isinstance(rate, torch.Tensor) else rate
        if len(args) < 2 and kwargs.get("closure") is None:  # a closure has its backward inside the step
            self._check(place, optimizer)
        if self._watched and place in self._versions:
            changed = [each for each, version in self._versions[place] if each._version != version]
            between = {
                "gradients of the step before kept": self._kept.pop(place, False),
                "parameters changed since": self._replicas.names_of(changed),
            }
            self._replicas.note(f"before {self._call(place)}", between)

    def _after_step(self, place: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._check(place, optimizer)
        self._used[place] = self._made
        self._stepped = True
        if self._watched:
            self._replicas.note(self._call(place), *optimizer.param_groups)
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._versions[place] = [(each, each._version) for each in parameters if is_split(each)]
            self._witnesses[place] = next((each for each in parameters if each.grad is not None), parameters[0])

    def _call(self, place: int) -> str:
        return f"optimizer{f' {place + 1}' * (place > 0)}.step() in step {self._step}"

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
