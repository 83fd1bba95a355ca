"""DeepSpeed's learning-rate schedules by name, as torch schedulers.

Each is a function of n, the number of optimizer steps made (0 before the first), as DeepSpeed's current releases
compute it; theirs count i = n - 1, from -1. W is warmup_num_steps (at least 2), T total_num_steps, and

    ramp(i) = log(i + 1) / log(W)   for warmup_type "log" (the default),   i / W   for "linear".

| name | learning rate |
|---|---|
| WarmupLR | i < 0: min; i < W: min + (max - min) ramp(i); then max |
| WarmupDecayLR | the same up to W; then min + (max - min) (T - i) / (T - W), and not below min |
| WarmupCosineLR | lr times: i < 0: 0; i < W: r + (1 - r) ramp(i); then c + (1 - c) (1 + cos(pi p)) / 2, where r is |
| | warmup_min_ratio, c cos_min_ratio, and p = (i - W + 1) / (T - W), at most 1 |
| OneCycle | up from cycle_min_lr to cycle_max_lr in cycle_first_step_size steps, down in cycle_second_step_size, |
| | then min / (1 + decay_lr_rate s / decay_step_size), s steps later; the first beta goes the other way (n > 0) |
| LRRangeTest | lr_range_test_min_lr (1 + lr_range_test_step_rate n / lr_range_test_step_size) |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

_SECOND_BETA = 0.99  # DeepSpeed's OneCycle sets it, whatever the optimizer was made with

Rate = Callable[[int, float], float]
Momentum = Callable[[int], float]
_Curves = tuple[Rate, Momentum | None]


class Schedule(LRScheduler):
    """Sets the learning rate of every parameter group to `rate(steps made, the group's own rate)`.

    Args:
        optimizer: whose rates are set, at once and after each `step()`.
        rate: see above.
        momentum: of the first beta, for optimizers that have betas; None leaves them.
        parameters: of the curves, to be saved, so that a resumed run sees which were changed.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, rate: Rate, momentum: Momentum | None, parameters: Mapping[str, Any]
    ) -> None:
        self._rate, self._parameters = rate, dict(parameters)
        self._momentum = momentum if "betas" in optimizer.defaults else None
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rates at `last_epoch`, which counts the steps."""
        if self._momentum is not None:
            for group in self.optimizer.param_groups:
                group["betas"] = (self._momentum(self.last_epoch), _SECOND_BETA)
        return [self._rate(self.last_epoch, float(base)) for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the number of steps, the rates, and what the curves were made of."""
        return {"last_epoch": self.last_epoch, "_last_lr": self._last_lr, **self._parameters}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there; the shape of the schedule stays as it was made."""
        self.last_epoch, self._last_lr = state_dict["last_epoch"], state_dict["_last_lr"]


def make_schedule(optimizer: torch.optim.Optimizer, name: str, parameters: Mapping[str, Any]) -> Schedule:
    """The schedule of this name, for parameters that have been checked: known ones, with the needed ones there."""
    return Schedule(optimizer, *SCHEDULES[name](**parameters), parameters=parameters)


def _ramp(warmup_num_steps: float, warmup_type: str) -> tuple[int, Callable[[int], float]]:
    steps = max(2, int(warmup_num_steps))
    if warmup_type == "linear":
        return steps, lambda i: i / steps
    return steps, lambda i: math.log(i + 1) / math.log(steps)


def _warmup(
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: float = 1000,
    warmup_type: str = "log",
) -> _Curves:
    return _warmup_decay(None, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)


def _warmup_decay(
    total_num_steps: float | None,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = 0.001,
    warmup_num_steps: float = 1000,
    warmup_type: str = "log",
) -> _Curves:
    warm, ramp = _ramp(warmup_num_steps, warmup_type)

    def rate(n: int, own: float) -> float:
        top, i = own if warmup_max_lr is None else warmup_max_lr, n - 1
        if i < 0:
            share = 0.0
        elif i < warm or total_num_steps is None:
            share = ramp(i) if i < warm else 1.0
        else:
            share = max(0.0, (total_num_steps - i) / max(1.0, total_num_steps - warm))
        return float(warmup_min_lr + (top - warmup_min_lr) * share)

    return rate, None


def _warmup_cosine(
    total_num_steps: float,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: float = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> _Curves:
    warm, ramp = _ramp(warmup_num_steps, warmup_type)

    def rate(n: int, own: float) -> float:
        i = n - 1
        if i < 0:
            return 0.0
        if i < warm:
            return float(own * (warmup_min_ratio + (1 - warmup_min_ratio) * ramp(i)))
        progress = min(1.0, (i - warm + 1) / max(1, total_num_steps - warm))
        return float(own * max(0.0, cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2))

    return rate, None


def _one_cycle(
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: float = 2000,
    cycle_second_step_size: float | None = None,
    decay_step_size: float = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9,
    decay_mom_rate: float = 0.0,
) -> _Curves:
    up = float(cycle_first_step_size)
    down = up if cycle_second_step_size is None else float(cycle_second_step_size)

    def height(n: int) -> float:
        """From 0 to 1 and back."""
        at = n % (up + down)
        return at / up if at <= up else (up + down - at) / down

    def intervals(n: int) -> float:
        return (n - up - down) / decay_step_size if decay_step_size else 0.0

    def rate(n: int, own: float) -> float:
        if n <= up + down:
            return float(cycle_min_lr + (cycle_max_lr - cycle_min_lr) * height(n))
        return float(cycle_min_lr / (1 + decay_lr_rate * intervals(n)))

    def momentum(n: int) -> float:
        if n <= up + down:
            fall = height(n) if n else 1.0  # as in DeepSpeed's first step
            return float(cycle_max_mom - (cycle_max_mom - cycle_min_mom) * fall)
        return float(cycle_max_mom * (1 + decay_mom_rate * intervals(n)))

    return rate, momentum if cycle_momentum else None


def _range_test(
    lr_range_test_min_lr: float = 0.001,
    lr_range_test_step_size: float = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> _Curves:
    def rate(n: int, own: float) -> float:
        intervals = n / lr_range_test_step_size
        intervals = math.floor(intervals) if lr_range_test_staircase else intervals
        return float(lr_range_test_min_lr * (1 + lr_range_test_step_rate * intervals))

    return rate, None


SCHEDULES: Mapping[str, Callable[..., _Curves]] = {
    "WarmupLR": _warmup,
    "WarmupDecayLR": _warmup_decay,
    "WarmupCosineLR": _warmup_cosine,
    "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}
"""The function behind each schedule. Its parameters without a default have to be in the configuration."""
