"""A step's time on a GPU is told by events on its stream. Here a stream that is none, whose clock goes on by hand."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from photinus.parallel.reducer.timeline import Timeline
from photinus.parallel.tracing.device_clock import DeviceClock
from photinus.parallel.tracing.recording import MAIN, Recording, set_current_recording
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


# -- the timeline of DistributedDataParallel, and photinus.trace -------------------------------------------------------


def step(timeline: Timeline, stream: Stream) -> None:
    timeline.forward_began()
    stream.queue(10)
    timeline.forward_ended(None)
    timeline.backward_began()
    stream.queue(15)
    timeline.exchange_began()
    stream.queue(5)
    timeline.backward_ended()
    stream.queue(2)
    timeline.exchange_ended(1)


def test_the_timeline_of_a_device_has_the_devices_times_as_soon_as_they_are_known(stream: Stream) -> None:
    timeline = Timeline(device_clock=DeviceClock(stream.record))
    step(timeline, stream)
    timeline.forward_began()
    assert timeline.last == {}, "the device has not come by, and nobody waits for it"
    stream.run()
    timeline.forward_began()
    assert timeline.last["forward_compute_time"] == pytest.approx(10e6, abs=2)
    assert timeline.last["backward_compute_time"] == pytest.approx(20e6, abs=2)
    assert timeline.last["backward_comm_time"] == pytest.approx(7e6, abs=2)
    assert timeline.last["backward_compute_comm_overlap_time"] == pytest.approx(5e6, abs=2)


def test_iterations_that_nobody_looks_at_queue_no_events(stream: Stream) -> None:
    events: list[Event] = []

    def record() -> Event:
        events.append(stream.record())
        return events[-1]

    timeline = Timeline(device_clock=DeviceClock(record), sample_rate=100)
    for _ in range(10):
        step(timeline, stream)
        stream.run()
    events.clear()
    for _ in range(50):
        step(timeline, stream)
    assert events == []


def test_a_recording_holds_spans_of_the_device_on_the_hosts_clock(stream: Stream) -> None:
    recording = Recording()
    set_current_recording(recording)
    try:
        step(Timeline(device_clock=DeviceClock(stream.record)), stream)
    finally:
        set_current_recording(None)
    stream.run()
    by_name = {span.name: span for span in recording.spans()}
    assert list(by_name) == ["forward", "wait for averages"]
    forward, wait = by_name["forward"], by_name["wait for averages"]
    assert (forward.end_ns - forward.begin_ns) == pytest.approx(10e6, abs=2)
    assert wait.begin_ns - forward.end_ns == pytest.approx(20e6, abs=2)
    assert wait.end_ns - wait.begin_ns == pytest.approx(2e6, abs=2)


def test_after_an_error_a_device_that_hangs_is_not_waited_for(stream: Stream) -> None:
    clock = DeviceClock(stream.record)
    recording = Recording()
    recording.use_clock(clock)
    recording.begin_step()
    begin = recording.now()
    stream.queue(1)
    stream.run()
    recording.add("came", MAIN, begin, recording.now())
    stream.queue(1)
    recording.add("never came", MAIN, begin, recording.now())
    assert [span.name for span in recording.spans(wait=False)] == ["came"]
    assert stream.done_ms == 1
