"""A step's time on a GPU is told by events on its stream. Here a stream that is none, whose clock goes on by hand."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from photinus.parallel.tracing.device_clock import DeviceClock
from photinus.runlog.tables import PHASES
from photinus.trainer.record.step_clock import StepClock
from photinus.waiting_time import waiting_time


class Stream:
    """What is queued runs later: `queue` says how long it takes, an event comes when all before it is done."""

    def __init__(self) -> None:
        self.queued_ms = self.done_ms = 0.0

    def queue(self, milliseconds: float) -> None:
        self.queued_ms += milliseconds

    def run(self) -> None:
        self.done_ms = self.queued_ms

    def record(self) -> Event:
        return Event(self, self.queued_ms)


class Event:
    def __init__(self, stream: Stream, at_ms: float) -> None:
        self.stream, self.at_ms = stream, at_ms

    def query(self) -> bool:
        return self.stream.done_ms >= self.at_ms

    def synchronize(self) -> None:
        self.stream.done_ms = max(self.stream.done_ms, self.at_ms)

    def elapsed_time(self, later: Event) -> float:
        assert self.query()
        assert later.query(), "torch raises when an event has not come"
        return later.at_ms - self.at_ms


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def clock(stream: Stream) -> Iterator[Any]:
    session: Any = SimpleNamespace(aside_s=0.0, device=torch.device("cpu"))
    found = StepClock(session, DeviceClock(stream.record))
    found.start()
    yield found
    found.stop()


def taken(clock: StepClock) -> dict[str, float]:
    return {phase: round(s * 1000, 3) for phase, s in zip(PHASES, clock.take(), strict=True) if s}


def test_phases_are_what_the_device_did_and_not_when_python_queued_it(stream: Stream, clock: Any) -> None:
    clock.data_came()
    stream.queue(20)
    clock.backward_began()
    stream.queue(40)
    clock.backward_ended()
    clock.optimizing_began()
    stream.queue(5)
    clock.optimizing_ended()
    assert stream.done_ms == 0, "marking waits for nothing"
    assert taken(clock) == {"forward": 20, "backward": 40, "optimizer": 5}
    assert taken(clock) == {}


def test_a_wait_of_the_stream_for_other_ranks_is_waiting_wherever_it_falls(stream: Stream, clock: Any) -> None:
    clock.data_came()
    stream.queue(3)
    outer = waiting_time.begin()
    inner = waiting_time.begin()  # counts once
    stream.queue(7)
    waiting_time.end(inner)
    waiting_time.end(outer)
    clock.backward_began()
    stream.queue(10)

    def autograd() -> None:  # the backward of a GPU runs on a thread of its own
        waiting_time.lend_thread()
        began = waiting_time.begin()
        assert began
        stream.queue(30)
        waiting_time.end(began)

    thread = Thread(target=autograd)
    thread.start()
    thread.join()
    clock.backward_ended()
    assert taken(clock) == {"forward": 3, "backward": 10, "waiting": 37}


def test_a_wait_that_raised_does_not_confuse_the_next_step(stream: Stream, clock: Any) -> None:
    waiting_time.begin()
    stream.queue(1)
    clock.data_came()
    began = waiting_time.begin()
    stream.queue(2)
    waiting_time.end(began)
    clock.backward_began()
    assert taken(clock) == {"data": 1, "waiting": 2}


def test_validation_and_saving_are_no_part_of_a_step_of_the_device(stream: Stream, clock: Any) -> None:
    stream.queue(510)
    clock._session.aside_s += 0.5
    clock.other_ended()
    stream.queue(300)
    clock.skip()
    stream.queue(1)
    clock.data_came()
    assert taken(clock) == {"other": 10, "data": 1}
