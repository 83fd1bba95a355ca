"""Losses that are means over different numbers of things on each rank: tokens, sums of class weights.

The mean over the global batch is sum(n * loss) / sum(n), over all ranks and all batches of a step. The sum of n of all
ranks is known before a backward, by an all-reduce of one number, and each rank multiplies its loss by
world size * n / sum(n). So gradients are right for all code that exchanges, clips or checks them, and as
large as those of a plain mean, which suits bfloat16 and float16 on the wire. (A factor behind the exchange would save
that wait, and cost a pass over all gradients in each step.)

Where a step has several batches, sum(n) of the later ones is not known yet. Their losses count relative to the first
batch's sum(n), and the last backward is followed by one factor for the whole step, before anything reads gradients.

A rank with n = 0 takes part with zero gradients of its own: its mean is 0 / 0, and NaN * 0 is NaN, which becomes 0
wherever its backward meets it. What comes from other ranks below that (batch norm, a gather of features) stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import PhotinusError
from ..parallel.zero.split_states import own_part
from .session.session import Session

_WHOLE = 1 - 1e-6


@dataclass
class Mean:
    """The parts of one mean: several batches, or several parts of a batch.

    Attributes:
        shares: the sum of the parts' shares.
        total: the sum of share * n over all parts and ranks.
        reference: the n over all ranks of the first part with an n above 0.
        others: the models whose gradients no backward of this mean has changed, if the loop trains several models.
    """

    shares: float = 0.0
    total: float = 0.0
    reference: float = 0.0
    others: Sequence[nn.Module] = ()


class WeightedMeans:
    """The weighted losses of a loop.

    Args:
        models: that the loop trains.
        parameters: a function that returns all parameters of the loop that have gradients.

    Attributes:
        steps_last: whether no backward may follow an optimizer's step in a step of the loop.
    """

    steps_last = False

    def __init__(self, session: Session, models: Sequence[nn.Module], parameters: Callable[[], Iterable[Any]]) -> None:
        self._session, self._models, self._parameters = session, models, parameters
        self._before: list[list[Any]] = []  # the gradients of the mean's other models, before a backward
        self._mean: Mean | None = None  # of which more parts may come
        self._batches, self._is_last = 1, True
        self._shares = 0.0  # of the parts of the running batch
        self._has_plain = False  # whether the running batch had a loss without weight
        self._weighted: bool | None = None  # whether the losses of a step of several batches are; None before the first

    def body_began(self, *, batches: int, is_first: bool, is_last: bool) -> None:
        """A batch begins, of a step of N batches."""
        self._batches, self._is_last, self._shares, self._has_plain = batches, is_last, 0.0, False
        if is_first:
            self._mean = self._weighted = None

    def part(self, weight: Any, share: float) -> tuple[float, float, Callable[[], float]]:
        """Add a loss of this rank to the mean. All ranks call it, for a loss without weight (None) too.

        Returns:
            World size * n / sum(n) of this batch, 0 without n; the factor of the loss before backward; and how much the
            loss counts in the mean, to be asked at the step's end.

        Raises:
            ValueError: the weight is not a finite number from 0, or the losses of a step do not fit together.
        """
        if self._batches > 1 and self._weighted is (weight is None):
            raise ValueError("loop.backward: with accumulate either all losses of a step have a weight, or none has")
        self._weighted = weight is not None
        is_part = share < _WHOLE if weight is not None else 0.0 < self._shares < _WHOLE
        if is_part and self._batches == 1 and (weight is None or self._has_plain):
            raise ValueError(
                "loop.backward: the gradients of a loss without weight would be scaled with those of the weighted "
                "parts of a batch (share=...). Call its backward after the last part"
            )
        self._has_plain |= weight is None
        if weight is None:
            return 1.0, 1.0, lambda: share
        if self._batches > 1 and self._shares >= _WHOLE:
            raise ValueError("loop.backward: a second weighted loss of a batch, with accumulate; add the two up before")
        weight = number_of(weight)
        total = weight
        if self._session.world_size > 1:
            sums = torch.tensor([weight], dtype=torch.float64, device=self._session.exchange_device)
            dist.all_reduce(sums)
            total = float(sums)
        self._mean = mean = self._mean or Mean(others=self._models if len(self._models) > 1 else ())
        self._shares += share
        mean.shares += share
        mean.total += share * total
        mean.reference = mean.reference or total
        own = self._session.world_size * weight / total if total else 0.0
        factor = own * (share / self._batches) * (total / mean.reference) if total else 0.0
        return own, factor, lambda: share * total * mean.shares / mean.total if mean.total else 0.0

    def backward_began(self) -> None:
        """A backward of a loss begins."""
        self._before = [_gradients_of(model) for model in self._mean.others] if self._mean is not None else []

    def backward_ended(self) -> None:
        """Gradients of a part are there. Makes those of a whole mean right."""
        mean = self._mean
        if mean is None:
            return
        pairs = zip(mean.others, self._before, strict=True)
        mean.others = [model for model, before in pairs if _gradients_of(model) == before]
        if self._shares < _WHOLE:
            return
        if self._is_last:
            factor = mean.shares * mean.reference / mean.total if mean.total else 1.0
            unscaled = {id(parameter) for model in mean.others for parameter in model.parameters()}
            for parameter in self._parameters() if factor != 1.0 else ():
                if id(parameter) not in unscaled:
                    values_of(parameter.grad).mul_(factor)
        if self._batches == 1:
            self._mean, self._shares = None, 0.0

    def gradients_came(self) -> None:
        """A backward is over, of a loss with or without weight."""

    def before_step(self) -> None:
        """An optimizer steps next, in a body."""

    def body_ended(self) -> None:
        """The batch is done. Raises PhotinusError if its losses were parts of a mean that is not whole."""
        if 0.0 < self._shares < _WHOLE:
            raise PhotinusError(
                f"the shares of a batch's weighted losses add up to {self._shares:.4g}, but 1 is needed. Give no share "
                f"where the gradients of several batches add up: photinus.Loop(..., accumulate=4) knows it."
            )


def _gradients_of(model: nn.Module) -> list[Any]:
    """Something that a backward through this model changes."""
    return [(id(each.grad), each.grad._version) for each in model.parameters() if each.grad is not None]


def values_of(gradient: Tensor) -> Tensor:
    """Return the values of a gradient that this rank holds, to change them."""
    part: Tensor = own_part(gradient)
    return part._values() if part.is_sparse else part


def number_of(weight: Any) -> float:
    """A weight as a float. Of a GPU's tensor this waits."""
    try:
        number = float(weight.detach() if isinstance(weight, Tensor) else weight)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"loop.backward: weight={weight!r}, but a number is needed, or a tensor of one") from None
    if not 0 <= number < math.inf:
        raise ValueError(f"loop.backward: weight={number}, but a finite number from 0 is needed")
    return number


@contextmanager
def zero_gradients(loss: Tensor) -> Iterator[None]:
    """A block in which the backward of a loss that was multiplied by 0 gives zeros, also where the loss is NaN.

    All ranks' hooks see gradients.
    """
    stack: list[Any] = [loss.grad_fn]
    nodes: set[Any] = set(stack)
    while stack:
        for below, _ in stack.pop().next_functions:
            if below is not None and below not in nodes:
                nodes.add(below)
                stack.append(below)
    hooks = [node.register_prehook(_zeros) for node in nodes]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _zeros(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else _without_nan(gradient) for gradient in gradients)


def _without_nan(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:  # with its rows: optimizers that step only these do it on all ranks
        values = _without_nan(gradient._values())
        return torch.sparse_coo_tensor(gradient._indices(), values, gradient.shape, check_invariants=False)
    return gradient.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
