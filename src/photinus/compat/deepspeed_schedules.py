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
| | then min / (1 + decay_lr_rate s / decay_step_size), s steps later; the first beta goes the other way |
| LRRangeTest | lr_range_test_min_lr (1 + lr_range_test_step_rate n / lr_range_test_step_size) |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["NEEDED", "SCHEDULES", "Schedule", "make_schedule"]

SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {
        "total_num_steps": None,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "WarmupCosineLR": {
        "total_num_steps": None,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
    "OneCycle": {
        "cycle_min_lr": None,
        "cycle_max_lr": None,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 0.001,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
}
"""The parameters of each schedule with their defaults."""
NEEDED = {"WarmupDecayLR": ("total_num_steps",), "WarmupCosineLR": ("total_num_steps",)} | {
    "OneCycle": ("cycle_min_lr", "cycle_max_lr")
}
_SECOND_BETA = 0.99  # DeepSpeed's OneCycle sets it, whatever the optimizer was made with

Rate = Callable[[int, float], float]
Momentum = Callable[[int], float]


class Schedule(LRScheduler):
    """Sets the learning rate of every parameter group to `rate(steps made, the group's own rate)`.

    Args:
        optimizer: whose rates are set, at once and after each `step()`.
        rate: see above.
        momentum: of the first beta, for optimizers that have betas; None leaves them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rate: Rate, momentum: Momentum | None = None) -> None:
        self._rate = rate
        self._momentum = momentum if "betas" in optimizer.defaults else None
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rates at `last_epoch`, which counts the steps."""
        if self._momentum is not None:
            for group in self.optimizer.param_groups:
                group["betas"] = (self._momentum(self.last_epoch), _SECOND_BETA)
        return [self._rate(self.last_epoch, float(base)) for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the number of steps and the rates."""
        return {"last_epoch": self.last_epoch, "_last_lr": self._last_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there; the shape of the schedule stays as it was made."""
        self.last_epoch, self._last_lr = state_dict["last_epoch"], state_dict["_last_lr"]


def make_schedule(optimizer: torch.optim.Optimizer, name: str, given: Mapping[str, Any]) -> Schedule:
    """The schedule of this name, for parameters that have been checked: known ones, with the needed ones there."""
    params = {**SCHEDULES[name], **given}
    if name == "OneCycle":
        return Schedule(optimizer, _one_cycle(params), _momentum_of_cycle(params) if params["cycle_momentum"] else None)
    return Schedule(
        optimizer, {"LRRangeTest": _range_test, "WarmupCosineLR": _warmup_cosine}.get(name, _warmup)(params)
    )


def _ramp(params: Mapping[str, Any]) -> tuple[int, Callable[[int], float]]:
    steps = max(2, int(params["warmup_num_steps"]))
    if params["warmup_type"] == "linear":
        return steps, lambda i: i / steps
    return steps, lambda i: math.log(i + 1) / math.log(steps)


def _warmup(params: Mapping[str, Any]) -> Rate:
    warm, ramp = _ramp(params)
    least, most, total = params["warmup_min_lr"], params["warmup_max_lr"], params.get("total_num_steps")

    def rate(n: int, own: float) -> float:
        top, i = own if most is None else most, n - 1
        if i < 0:
            return float(least)
        if i < warm:
            return float(least + (top - least) * ramp(i))
        share = 1.0 if total is None else max(0.0, (total - i) / max(1.0, total - warm))
        return float(least + (top - least) * share)

    return rate


def _warmup_cosine(params: Mapping[str, Any]) -> Rate:
    warm, ramp = _ramp(params)
    first, last, total = params["warmup_min_ratio"], params["cos_min_ratio"], params["total_num_steps"]

    def rate(n: int, own: float) -> float:
        i = n - 1
        if i < 0:
            return 0.0
        if i < warm:
            return float(own * (first + (1 - first) * ramp(i)))
        done = min(1.0, (i - warm + 1) / max(1, total - warm))
        return float(own * max(0.0, last + (1 - last) * (1 + math.cos(math.pi * done)) / 2))

    return rate


def _cycle(params: Mapping[str, Any]) -> tuple[float, Callable[[int], float]]:
    """The length of the cycle, and how high it is after n steps: 0 to 1 and back."""
    first = float(params["cycle_first_step_size"])
    second = first if params["cycle_second_step_size"] is None else float(params["cycle_second_step_size"])

    def height(n: int) -> float:
        at = n % (first + second)
        return at / first if at <= first else (first + second - at) / second

    return first + second, height


def _one_cycle(params: Mapping[str, Any]) -> Rate:
    length, height = _cycle(params)
    least, most, decay = params["cycle_min_lr"], params["cycle_max_lr"], params["decay_lr_rate"]

    def rate(n: int, own: float) -> float:
        if n <= length:
            return float(least + (most - least) * height(n))
        intervals = (n - length) / params["decay_step_size"] if params["decay_step_size"] else 0.0
        return float(least / (1 + decay * intervals))

    return rate


def _momentum_of_cycle(params: Mapping[str, Any]) -> Momentum:
    length, height = _cycle(params)
    least, most, decay = params["cycle_min_mom"], params["cycle_max_mom"], params["decay_mom_rate"]

    def momentum(n: int) -> float:
        if n <= length:
            return float(most - (most - least) * height(n))
        intervals = (n - length) / params["decay_step_size"] if params["decay_step_size"] else 0.0
        return float(most * (1 + decay * intervals))

    return momentum


def _range_test(params: Mapping[str, Any]) -> Rate:
    def rate(n: int, own: float) -> float:
        intervals = n / params["lr_range_test_step_size"]
        if params["lr_range_test_staircase"]:
            intervals = math.floor(intervals)
        return float(params["lr_range_test_min_lr"] * (1 + params["lr_range_test_step_rate"] * intervals))

    return rate
