"""From a batch to its loss: of a loss function, a function of the whole step, or a model that returns its loss.

Each gives a mean, and the number of things that it is a mean over. That of torch's losses is known, and that of a model
that returns its loss is tried out. What is seen to be a mean over other things is refused, with what to write.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from ..parallel.exchange.agreement import gather_per_rank
from ..parallel.tracing.device_clock import Moment, clock_of
from .checkpoint.states import unwrap
from .forwards import evaluating

_COUNTED = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward, cross_entropy, nll_loss)
_OWN_ENDS = ("NllLossBackward0", "NllLoss2DBackward0")  # of autograd, where a function ends in a cross-entropy
_MEAN = 1  # of torch's reductions
_IGNORED = -100  # torch's default
_TOLERANCE = 0.02  # of losses in bfloat16
_ADVICE = (
    "step=f with f(model, batch) that returns (loss, weight): the mean, and the number of things it is a mean over"
)


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
        function = _uncompiled(function)
        bound = function.keywords if isinstance(function, partial) else {}
        kind: Any = type(function)
        is_module = isinstance(function, nn.Module)
        # A subclass may compute something else, as may arguments by place.
        inner = _uncompiled(function.func) if isinstance(function, partial) else function
        inner = kind.forward if is_module else inner
        options = vars(function) if is_module else bound
        counted = inner in _COUNTED and not getattr(function, "args", ())
        self.is_sum = getattr(inner, "__module__", "").startswith("torch.nn.") and options.get("reduction") == "sum"
        self._counted = counted and options.get("reduction", "mean") == "mean"
        self._ignored_targets = _LateCount(
            "{left_out} of {all} targets are -100, torch's ignore_index by default. If that is right, name another "
            "one, such as CrossEntropyLoss(ignore_index=-1), or return (sum, weight) from loss_fn"
        )
        self._left_out = _LateCount(
            "loss_fn ends in a cross-entropy whose mean divides by {counted:g}, and it has {all} targets: there are "
            "class weights, or targets that it ignores. Return (sum, weight) from loss_fn: the loss with "
            "reduction='sum', and what the mean divides by"
        )
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
        if self._counted:
            return loss, self._weight(targets)
        node = loss.grad_fn
        if node is not None and node.name() in _OWN_ENDS and node._saved_reduction == _MEAN:
            divisor, targets = node._saved_total_weight, node._saved_target.numel()
            if targets <= 1 / torch.finfo(divisor.dtype).eps:  # else its type may not have the number
                self._left_out.add(divisor, targets)
        return loss, None

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
            # Nearly no classifier has targets of -100, and each step of all others would pay for an exchange.
            return self._ignored_targets.add((targets != _IGNORED).sum(), targets.numel())
        counted = targets[targets != self._ignored]
        return counted.numel() if self._class_weights is None else self._class_weights.to(targets.device)[counted].sum()


class _LateCount:
    """A check that a mean counts all its targets. Nothing waits for a GPU: a count is looked at once it has come.

    Args:
        message: of the error, with {counted}, {left_out} and {all}.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self._counts: deque[tuple[Tensor, int, Moment | None]] = deque()

    def add(self, counted: Tensor, targets: int) -> None:
        """Look at this count as soon as it is there. Raises ValueError for one before that differs."""
        count, clock = counted.to("cpu", non_blocking=True), clock_of(counted.device)
        self._counts.append((count, targets, clock.now() if clock else None))
        while self._counts and ((moment := self._counts[0][2]) is None or moment.passed):
            found, of, _ = self._counts.popleft()
            if found != of:
                numbers = {"counted": float(found), "left_out": f"{of - float(found):g}", "all": of}
                raise ValueError(self._message.format(**numbers))


def _uncompiled(function: Any) -> Any:
    """Return what `torch.compile` was given."""
    function = getattr(function, "_orig_mod", getattr(function, "_torchdynamo_orig_callable", function))
    # Of a function of torch's own, dynamo puts another one around it.
    is_dynamos = getattr(function, "__globals__", {}).get("__name__", "").startswith("torch._dynamo")
    return function.__wrapped__ if is_dynamos and hasattr(function, "__wrapped__") else function


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
        self._ignored_labels = _LateCount(f"{{left_out}} of {{all}} labels are -100, which the loss ignores: {_ADVICE}")

    def _loss(self, model: nn.Module, batch: Any) -> Any:
        output = model(**batch) if isinstance(batch, Mapping) else model(batch)
        loss = getattr(output, "loss", None)
        if loss is None:
            raise TypeError(
                f"the model returned a {type(output).__name__} without a loss: give Trainer a loss_fn, or step=f with "
                f"f(model, batch) -> loss (models of Transformers return a loss if the batch has labels)"
            )
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return loss
        if labels.dim() < 2:
            self._ignored_labels.add((labels != _IGNORED).sum(), labels.numel())
            return loss
        if self._shifts is None:
            self._shifts = _find_shift(unwrap(model), batch)
        return loss, (labels[..., self._shifts :] != _IGNORED).sum()


def _find_shift(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Return whether a model's loss leaves the first label of each sequence out: names of classes do not say it.

    All ranks call it together, in the first batch. It makes five forwards on each, which draw no random numbers.

    Raises:
        ValueError: on some rank the loss is not a mean over the labels that are not -100; all ranks raise.
    """
    labels = batch["labels"]
    none = torch.full_like(labels, _IGNORED)
    first = none.clone()
    first[..., 0] = 0
    with evaluating(model):

        def loss_of(labels: Tensor) -> float:
            return float(model(**{**batch, "labels": labels}).loss)

        of_none, shifts = loss_of(none), not loss_of(first) > 0  # a mean of nothing is NaN, or 0
        # The rows with most and with least labels, each alone, and both.
        counts = (labels[..., shifts:] != _IGNORED).flatten(1).sum(1)
        most, least = int(counts.argmax()), int(counts.argmin())
        rows, losses = [[most], [least], [most, least]], []
        for pair in rows:
            part = none.clone()
            part[pair] = labels[pair]
            losses.append(loss_of(part))
    weights = [int(counts[row]) for row in (most, least)]
    total = sum(weight * loss for weight, loss in zip(weights, losses, strict=False) if weight)
    expected = total / sum(weights) if most != least and any(weights) else losses[2]
    error = ""
    if of_none > 0:
        error = f"it is {of_none:.4g} where all labels are -100"
    elif any(weights) and not math.isclose(losses[2], expected, rel_tol=_TOLERANCE):
        error = f"of two rows with {weights} labels it is {losses[2]:.4g}, and such a mean is {expected:.4g}"
    errors = {rank: each for rank, each in enumerate(gather_per_rank(error)) if each}
    for rank, each in errors.items():
        raise ValueError(
            f"the loss of {type(model).__name__} is not a mean over the labels that are not -100 (rank {rank}: {each})."
            f" If it is a mean over samples, give Trainer step=f with f(model, batch) that returns it; else {_ADVICE}"
        )
    return shifts
