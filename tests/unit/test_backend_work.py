"""What a work of the engine does at its end, with an operation that the test plays."""

from __future__ import annotations

import threading
import time
from typing import Any

from photinus.backend.work import EngineWork


class _Handle:
    """An operation that has ended."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def wait(self, timeout_s: float = 0.0, sees: bool = True) -> None:
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        return True

    def error(self, sees: bool = True) -> Exception | None:
        return self._error


def _work(copied: list[float], error: Exception | None = None) -> EngineWork:
    def copy_back() -> None:
        time.sleep(0.05)
        copied.append(time.monotonic())

    handle: Any = _Handle(error)
    finish: Any = copy_back
    return EngineWork(handle, [], lambda wait, complete: None, finish)


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
