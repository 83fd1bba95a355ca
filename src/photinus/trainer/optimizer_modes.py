"""Optimizers with `train()` and `eval()`, as schedule-free ones: they train other weights than those to use.

`eval()` puts the weights to use into the parameters, and `train()` those to train, computed from the optimizer's state
with rounding: a switch forth and back is not exact. An evaluation switches, as in plain torch. A save must not change
what is trained, but its file has the weights to use. So the optimizer's state in it has those to train, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_TRAINED = "training_weight"  # in a saved optimizer's state of a parameter


def switching(objects: Iterable[Any]) -> list[Any]:
    """Return the optimizers among some objects that have `train()` and `eval()`."""
    steppers = [each for each in objects if hasattr(each, "param_groups") and not isinstance(each, nn.Module)]
    return [each for each in steppers if all(callable(getattr(each, verb, None)) for verb in ("train", "eval"))]


def is_training(optimizer: Any) -> bool:
    """Return whether the parameters have the weights to train."""
    if isinstance(mode := getattr(optimizer, "train_mode", None), bool):
        return mode
    return any(group.get("train_mode", True) for group in optimizer.param_groups)


@contextmanager
def evaluating_weights(optimizers: Sequence[Any], model: nn.Module) -> Iterator[None]:
    """A block in which a model has the weights to use. All ranks enter it: zero1's optimizers exchange them."""
    own = {id(parameter) for parameter in model.parameters()} if optimizers else set()
    switched = [each for each in optimizers if is_training(each) and any(id(p) in own for p in _parameters_of(each))]
    for each in switched:
        each.eval()
    try:
        yield
    finally:
        for each in switched:
            each.train()


class OptimizerModes:
    """The switching optimizers of a loop.

    Args:
        objects: what the loop saves, by name.
        running: takes the optimizers while bodies run, for what evaluates.
    """

    def __init__(self, objects: Iterable[Any], running: list[Any]) -> None:
        self._optimizers, self._running = switching(objects), running
        self._trained: list[tuple[Any, dict[Any, Tensor]]] = []  # of a checkpoint, until bodies begin

    def loaded(self) -> None:
        """A checkpoint was loaded: the model has the weights to use. A run that has ended keeps them."""
        self._trained = [(each, _take(each)) for each in self._optimizers]

    def begin(self) -> None:
        """Bodies begin."""
        trained, self._trained = self._trained, []
        for each in self._optimizers:
            each.train()
        for each, weights in trained:
            _put_back(each, weights)
        self._running += self._optimizers

    def end(self, *, is_finished: bool) -> None:
        """Bodies are over. A finished run leaves the weights to use."""
        for each in self._optimizers:
            if each in self._running:
                self._running.remove(each)
                if is_finished:
                    each.eval()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A block in which the model has the weights to use, and optimizers remember those to train."""
        switched = [each for each in self._optimizers if is_training(each)]
        for each in switched:
            for parameter, state in each.state.items():
                if state and isinstance(parameter, Tensor):
                    state[_TRAINED] = parameter.detach().clone()
            each.eval()
        try:
            yield
        finally:
            for each in switched:
                each.train()
                _put_back(each, _take(each))


def _parameters_of(optimizer: Any) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _take(optimizer: Any) -> dict[Any, Tensor]:
    states = optimizer.state.items()
    return {parameter: state.pop(_TRAINED) for parameter, state in states if state and _TRAINED in state}


@torch.no_grad()
def _put_back(optimizer: Any, weights: dict[Any, Tensor]) -> None:
    for parameter, weight in weights.items():
        parameter.copy_(weight)
    optimizer.train()  # nothing changes, but zero1 brings each rank's part to the others
