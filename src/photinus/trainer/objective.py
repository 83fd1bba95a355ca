"""From a batch to its loss: of a loss function, a function of the whole step, or a model that returns its loss.

Each gives a mean, and the number of things that it is a mean over: that of torch's losses is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from ..parallel.tracing.device_clock import Moment, clock_of, is_past
from .checkpoint.states import unwrap
from .forwards import evaluating

_COUNTED = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward, cross_entropy, nll_loss)
_IGNORED = -100  # torch's default


def sum_and_weight(name: str, value: tuple[Any, ...]) -> tuple[Tensor, Any]:
    """Return what a function gave as (sum, weight). Raises TypeError if it is something else."""
    if len(value) != 2 or not isinstance(value[0], Tensor):
        kinds = ", ".join(type(each).__name__ for each in value)
        raise TypeError(f"{name} returned ({kinds}), but a tensor is needed, or (sum, weight): a tensor and a number")
    return value[0], value[1]


def pair_of(batch: Any, who: str, advice: str) -> tuple[Any, Any]:
    """Refuses a batch whose parts are no inputs and targets: a tensor of two samples would be taken for them."""
    if isinstance(batch, (Tensor, Mapping, str)) or (isinstance(batch, Sequence) and len(batch) != 2):
        parts = f" of {len(batch)} parts" if isinstance(batch, Sequence) else ""
        raise TypeError(f"{who} batches (inputs, targets), but got a {type(batch).__name__}{parts}: {advice}")
    inputs, targets = batch
    return inputs, targets


class Objective:
    """A loss function of (outputs, targets) that returns a mean, or (sum, weight).

    Attributes:
        is_sum: whether its value is the sum over a batch.
    """

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._function = function
        bound = function.keywords if isinstance(function, partial) else {}
        kind: Any = type(function)
        is_module = isinstance(function, nn.Module)
        # A subclass may compute something else, as may arguments by place.
        inner = kind.forward if is_module else function.func if isinstance(function, partial) else function
        options = vars(function) if is_module else bound
        counted = inner in _COUNTED and not getattr(function, "args", ())
        self.is_sum = getattr(inner, "__module__", "").startswith("torch.nn.") and options.get("reduction") == "sum"
        self._counted = counted and options.get("reduction", "mean") == "mean"
        self._ignored_counts: deque[tuple[Tensor, int, int | Moment]] = deque()
        self._ignored = options.get("ignore_index", _IGNORED)
        self._class_weights = getattr(function, "weight", None) if is_module else bound.get("weight")

    def forward(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Return what a call takes, of a batch."""
        inputs, targets = pair_of(batch, "loss_fn needs", "give step=f instead, with f(model, batch) -> loss")
        return model(inputs), targets

    def __call__(self, outputs: Any, targets: Any) -> tuple[Tensor, Any]:
        """Return the loss, and its weight for `loop.backward`: None for a mean over samples, or a sum."""
        loss = self._function(outputs, targets)
        if isinstance(loss, tuple):
            total, weight = sum_and_weight("loss_fn", loss)
            return total / weight, weight
        return loss, self._weight(targets) if self._counted else None

    def sums(self, outputs: Any, targets: Any, samples: int) -> tuple[Tensor, Any]:
        """Return (sum, weight) of a batch of N samples. The sum of all sums by that of all weights is the mean."""
        loss = self._function(outputs, targets)
        if isinstance(loss, tuple):
            return sum_and_weight("loss_fn", loss)
        weight = self._weight(targets) if self._counted else None
        if weight is None:
            return loss.double() if self.is_sum else loss.double() * samples, samples
        return loss.double() * weight if weight else torch.zeros(()), weight  # a mean of nothing is NaN

    def _weight(self, targets: Tensor) -> Any:
        """Return what torch divides by: targets that are not ignored, each by its class weight."""
        if targets.is_floating_point():  # probabilities of classes: the mean is over samples
            return None
        if self._class_weights is None and self._ignored == _IGNORED and targets.dim() < 2:
            return self._refuse_ignored(targets)
        counted = targets[targets != self._ignored]
        return counted.numel() if self._class_weights is None else self._class_weights.to(targets.device)[counted].sum()

    def _refuse_ignored(self, targets: Tensor) -> None:
        """Nearly no classifier has targets of -100, so that each step of all others would pay for an exchange.

        Nothing waits for a GPU: a count is looked at in the first step after it has come.
        """
        count, clock = (targets == _IGNORED).sum().to("cpu", non_blocking=True), clock_of(targets.device)
        self._ignored_counts.append((count, targets.numel(), clock.now() if clock else 0))
        while self._ignored_counts and is_past(self._ignored_counts[0][2]):
            ignored, targets_then, _ = self._ignored_counts.popleft()
            if ignored:
                raise ValueError(
                    f"{ignored} of {targets_then} targets are -100, torch's ignore_index by default. If that is right, "
                    f"name another one, such as CrossEntropyLoss(ignore_index=-1), or return (sum, weight) from loss_fn"
                )


class StepObjective(Objective):
    """A function of (model, batch) that returns a mean loss, or (loss, weight)."""

    is_sum = False

    def __init__(self, step: Callable[[Any, Any], Any]) -> None:
        self._step = step

    def forward(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Return the loss and its weight, None for a mean over samples: the function makes the forward."""
        loss = self._step(model, batch)
        return sum_and_weight("step", loss) if isinstance(loss, tuple) else (loss, None)

    def __call__(self, outputs: Any, targets: Any) -> tuple[Tensor, Any]:
        """Return what `forward` gave."""
        return outputs, targets

    def sums(self, outputs: Any, targets: Any, samples: int) -> tuple[Tensor, Any]:
        """Return (sum, weight) of a batch of N samples."""
        loss, weight = self(outputs, targets)
        weight = samples if weight is None else weight
        return loss.double() * weight if weight else torch.zeros(()), weight  # a mean of nothing is NaN


class OutputObjective(StepObjective):
    """The loss that a model returns as `.loss`, as those of Transformers do: a mean over its labels."""

    def __init__(self) -> None:
        super().__init__(self._loss)
        self._shifts: bool | None = None  # whether each label is what the token before it predicts; not known yet

    def _loss(self, model: nn.Module, batch: Any) -> Any:
        output = model(**batch) if isinstance(batch, Mapping) else model(batch)
        loss = getattr(output, "loss", None)
        if loss is None:
            raise TypeError(
                f"the model returned a {type(output).__name__} without a loss: give Trainer a loss_fn, or step=f with "
                f"f(model, batch) -> loss (models of Transformers return a loss if the batch has labels)"
            )
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() < 2:
            return loss
        if self._shifts is None:
            self._shifts = _ignores_first_label(unwrap(model), batch)
        return loss, (labels[..., self._shifts :] != _IGNORED).sum()


def _ignores_first_label(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Return whether a model's loss leaves the first label of each sequence out: names of classes do not say it."""
    labels = torch.full_like(batch["labels"], _IGNORED)
    labels[..., 0] = 0
    with evaluating(model):  # which draws no random numbers
        loss = model(**{**batch, "labels": labels}).loss
    return not bool(loss > 0)  # a mean of nothing is NaN
