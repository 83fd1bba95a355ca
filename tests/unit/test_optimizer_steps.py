"""Who watches optimizer steps is told of each whole step once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from photinus.optimizer_steps import StepWatcher, unwatch_steps, watch_steps


class Seen(StepWatcher):
    def __init__(self) -> None:
        self.began: list[Any] = []
        self.ended: list[Any] = []
        watch_steps(self)

    def step_began(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        self.began.append((optimizer, has_closure))

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        self.ended.append(optimizer)


class Outer(torch.optim.SGD):
    """Steps by what it is given, and by its base class."""

    inner: Callable[[], object] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> Any:
        self.inner()
        return super().step(closure)


def sgd(kind: type[torch.optim.SGD] = torch.optim.SGD) -> Any:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    return kind([parameter], lr=0.1)


def test_an_optimizer_that_steps_through_others_makes_one_step() -> None:
    outer, inner, seen = sgd(Outer), sgd(), Seen()
    outer.inner = inner.step
    outer.step()
    inner.step()
    assert seen.began == [(outer, False), (inner, False)]
    assert seen.ended == [outer, inner]


def test_a_step_that_raises_has_begun_and_not_ended_and_the_next_is_a_whole_one() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    outer, other, seen = sgd(Outer), sgd(), Seen()
    outer.inner = fail
    with pytest.raises(ZeroDivisionError):
        outer.step()
    other.step()
    assert [optimizer for optimizer, _ in seen.began] == [outer, other]
    assert seen.ended == [other]


def test_steps_of_two_threads_at_a_time_are_two() -> None:
    outer, other, seen = sgd(Outer), sgd(), Seen()

    def in_another_thread() -> None:
        thread = threading.Thread(target=other.step)
        thread.start()
        thread.join()

    outer.inner = in_another_thread
    outer.step()
    assert seen.ended == [other, outer]


@pytest.mark.parametrize("given", [lambda step: step(lambda: 1.0), lambda step: step(closure=lambda: 1.0)])
def test_a_closure_is_told(given: Callable[[Any], object]) -> None:
    optimizer, seen = sgd(), Seen()
    given(optimizer.step)
    assert seen.began == [(optimizer, True)]


def test_a_compiled_step_is_told() -> None:
    optimizer, seen = sgd(), Seen()
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        step()
    assert seen.began == [(optimizer, False)] * 3
    assert seen.ended == [optimizer] * 3


def test_a_watcher_that_is_gone_or_has_ended_is_told_nothing() -> None:
    optimizer, first, gone = sgd(), Seen(), Seen()
    watch_steps(first)  # once more changes nothing
    told = gone.ended
    del gone
    gc.collect()
    optimizer.step()
    assert (first.ended, told) == ([optimizer], [])
    for _ in range(2):
        unwatch_steps(first)
    optimizer.step()
    assert first.ended == [optimizer]
