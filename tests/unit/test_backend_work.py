"""What a work of the engine does at its end, with an operation that the test plays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from photinus.backend.work import EngineWork, JoinedWork
from photinus.errors import CollectiveError


class _Handle:
    """An operation that has ended."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def wait(self, timeout_s: float = 0.0, sees: bool = True) -> None:
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return True

    def see(self) -> bool:
        return False

    def error(self, sees: bool = True) -> Exception | None:
        return self._error


def _work(copied: list[float], error: Exception | None = None) -> EngineWork:
    def copy_back() -> None:
        time.sleep(0.05)
        copied.append(time.monotonic())

    finish: Any = copy_back
    return EngineWork(_handle(error), [], lambda wait, complete: None, finish)


def _handle(error: Exception | None) -> Any:
    return _Handle(error)


def test_threads_that_wait_for_one_work_find_its_results_copied_back_once() -> None:
    copied: list[float] = []
    work, returned = _work(copied), []

    def wait() -> None:
        work.wait()
        returned.append(time.monotonic())

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(copied) == 1
    assert len(returned) == 3
    assert min(returned) >= copied[0]


def test_nothing_is_copied_back_after_a_failure() -> None:
    copied: list[float] = []
    work = _work(copied, OSError("lost"))
    assert work.is_completed()
    assert not work.is_success()
    assert copied == []


def _poll(work: EngineWork) -> None:
    while not work.is_completed():
        time.sleep(0.001)


def _wait_for_future(work: EngineWork) -> None:
    work.get_future().wait()  # as torch's DDP does


def _wait_behind_a_failure(work: EngineWork) -> None:
    failed = _work([], CollectiveError("lost"))
    with pytest.raises(CollectiveError, match="lost"):
        JoinedWork([failed, work], []).wait()


@pytest.mark.parametrize("error", [None, OSError("lost")])
@pytest.mark.parametrize("find_end", [EngineWork.wait, _poll, _wait_for_future, _wait_behind_a_failure])
def test_a_work_is_completed_after_a_profiler_has_its_end(
    find_end: Callable[[EngineWork], object], error: Exception | None
) -> None:
    """Otherwise the profiler could stop before, and the end would be written into memory that it has given back."""

    def submit(handle: Any, finish: Callable[[], object], complete: Callable[[None], None], may_exchange: bool) -> None:
        threading.Timer(0.1, complete, [None]).start()

    with torch.profiler.profile() as profiler:
        work = EngineWork(_handle(error), [], submit)
        work.end_event_when_done(torch.profiler.record_function("exchange").__enter__())
        with suppress(OSError, RuntimeError):
            find_end(work)
    (shown,) = (event for event in profiler.events() if event.name == "exchange")
    assert shown.time_range.elapsed_us() >= 100_000
    assert work.exception() is error
