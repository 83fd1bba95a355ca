"""What a step's time is booked under, and what booking it costs."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from photinus.runlog.tables import PHASES
from photinus.trainer.record import run_numbers, step_clock
from photinus.trainer.record.run_numbers import RankTimes, memory_bytes
from photinus.trainer.record.step_clock import StepClock
from photinus.waiting_time import WaitingTime, waiting_time


class Time:
    """A clock that goes on by hand, in milliseconds."""

    def __init__(self) -> None:
        self.now_ms = 1000

    def perf_counter_ns(self) -> int:
        return self.now_ms * 1_000_000

    def perf_counter(self) -> float:
        return self.now_ms / 1000

    def time(self) -> float:
        return 5.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    by_hand = Time()
    monkeypatch.setattr(step_clock, "time", by_hand)
    monkeypatch.setattr(waiting_time, "total_ns", 0)
    found: Any = StepClock(SimpleNamespace(aside_s=0.0, device=torch.device("cpu")))  # type: ignore[arg-type]
    found.by_hand = by_hand
    found.start()
    yield found
    found.stop()


def after(clock: Any, milliseconds: int, *, waited: int = 0) -> Any:
    clock.by_hand.now_ms += milliseconds
    waiting_time.total_ns += waited * 1_000_000
    return clock


def taken(clock: Any) -> dict[str, int]:
    return {phase: round(s * 1000) for phase, s in zip(PHASES, clock.take(), strict=True) if s}


def test_each_phase_gets_the_time_up_to_its_end(clock: Any) -> None:
    after(clock, 1).data_came()
    after(clock, 2).backward_began()
    after(clock, 3, waited=1).backward_ended()
    after(clock, 4).optimizing_began()
    after(clock, 5).optimizing_ended()
    after(clock, 6).other_ended()
    assert taken(clock) == {"data": 1, "forward": 2, "backward": 2, "waiting": 1, "optimizer": 5, "other": 10}
    assert taken(clock) == {}


def test_several_backwards_in_a_step_each_have_their_forward(clock: Any) -> None:
    after(clock, 0).data_came()
    for _ in range(3):
        after(clock, 2).backward_began()
        after(clock, 3).backward_ended()
    assert taken(clock) == {"forward": 6, "backward": 9}


def test_an_optimizer_inside_backward_is_part_of_it(clock: Any) -> None:
    clock.backward_began()
    after(clock, 1).optimizing_began()
    after(clock, 2).optimizing_ended()
    after(clock, 3).backward_ended()
    assert taken(clock) == {"backward": 6}


def test_the_closure_of_an_optimizer_is_forward_and_backward(clock: Any) -> None:
    clock.optimizing_began()
    after(clock, 1).backward_began()
    after(clock, 2).backward_ended()
    after(clock, 3).optimizing_ended()
    assert taken(clock) == {"forward": 1, "backward": 2, "optimizer": 3}


def test_validation_and_saving_are_no_part_of_a_step(clock: Any) -> None:
    clock._session.aside_s += 0.5
    after(clock, 510).other_ended()
    after(clock, 300).skip()
    after(clock, 1).data_came()
    assert taken(clock) == {"other": 10, "data": 1}


def test_steps_of_any_optimizer_are_seen_while_the_clock_runs(clock: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def takes_7_ms(*_: Any) -> None:  # runs after the clock's own hook
        after(clock, 7)

    optimizer.register_step_pre_hook(takes_7_ms)
    optimizer.step()
    clock.stop()
    after(clock, 5)
    optimizer.step()
    assert taken(clock) == {"optimizer": 7}


def test_a_body_that_was_cut_off_inside_backward_does_not_confuse_the_next(clock: Any) -> None:
    clock.backward_began()
    after(clock, 1).data_came()
    after(clock, 2).optimizing_began()
    after(clock, 3).optimizing_ended()
    assert taken(clock) == {"data": 1, "other": 2, "optimizer": 3}


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_a_wait_inside_a_wait_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = Time()
    monkeypatch.setattr("photinus.waiting_time.time", by_hand)
    waits = WaitingTime()
    waits.start()
    outer = waits.begin()
    for _ in range(2):
        inner = waits.begin()
        by_hand.now_ms += 10
        waits.end(inner)
    assert waits.total_ns == 20e6
    by_hand.now_ms += 5
    waits.end(outer)
    assert waits.total_ns == 25e6


def test_waits_of_other_threads_do_not_count() -> None:
    from threading import Thread

    waits = WaitingTime()
    waits.start()
    found: list[int] = []
    thread = Thread(target=lambda: found.append(waits.begin()))
    thread.start()
    thread.join()
    assert found == [0]


# -- bringing it together ---------------------------------------------------------------------------------------------


def rank_of(rank: int, world_size: int) -> RankTimes:
    session: Any = SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"), aside_s=0.0)
    clock: Any = SimpleNamespace(take=lambda: [rank + phase / 10 for phase in range(len(PHASES))])
    return RankTimes(session, clock)


def test_a_window_holds_the_times_and_memory_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = Time()
    monkeypatch.setattr(run_numbers, "time", by_hand)
    ranks = [rank_of(rank, 3) for rank in range(3)]
    ranks[0].add([rank.local_row() for rank in ranks], steps=4, samples=128)
    assert ranks[0].window(step=4, epoch=1, start=1, at_once=False) is None  # a second has not passed
    by_hand.now_ms += 1000
    window = ranks[0].window(step=4, epoch=1, start=1, at_once=False)
    assert window is not None
    assert window.phases["data"] == [0.0, 0.25, 0.5]
    assert window.phases["other"] == [0.125, 0.375, 0.625]
    assert (window.steps, window.samples, window.time_s) == (4, 128, 5.0)
    assert all(0 < held <= peak for held, peak in zip(window.memory["resident"], window.memory["peak"], strict=True))
    assert ranks[0].window(step=4, epoch=1, start=1, at_once=True) is None  # nothing new


def test_a_window_tells_the_slowest_link_of_each_rank_beside_its_median_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, float] = {0: 1.0, 2: 1.0, 3: 1.0}
    monkeypatch.setattr(run_numbers, "_under_way_s", lambda: dict(told))
    rank = rank_of(0, 1)
    for slow_s in (0.4, 0.6):
        told[0] += 0.1
        told[2] += slow_s
        told[3] += 0.2
        rank.add([rank.local_row()], steps=5, samples=5)
    window = rank.window(step=10, epoch=1, start=1, at_once=True)
    assert window is not None
    assert window.links == [(2, pytest.approx(0.1), pytest.approx(0.04))]


@pytest.mark.parametrize(("step_s", "steps"), [(0.0001, 16), (0.1, 10), (0.4, 2), (7.0, 1)])
def test_ranks_exchange_after_a_seconds_worth_of_steps(step_s: float, steps: int) -> None:
    rank = rank_of(0, 1)
    assert rank.steps_to_next == 1
    rank.add([[step_s * 2, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0]], steps=2, samples=2)
    assert rank.steps_to_next == steps


def test_windows_get_longer_with_the_run_so_that_their_number_grows_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    by_hand = Time()
    monkeypatch.setattr(run_numbers, "time", by_hand)
    rank = rank_of(0, 1)
    written = 0
    for _ in range(24 * 3600):
        by_hand.now_ms += 1000
        rank.add([[0.1] * 10 + [0.0] * 3], steps=1, samples=1)
        written += rank.window(step=1, epoch=1, start=1, at_once=False) is not None
    assert 5000 < written < 12_000


def test_memory_is_that_of_this_process() -> None:
    resident, peak, cuda, cuda_peak = memory_bytes(torch.device("cpu"))
    assert 10 << 20 < resident <= peak
    assert (cuda, cuda_peak) == (0, 0)
