"""The threads that complete futures."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from photinus.backend.completer import Completer


class _Operation:
    """Something in flight that the test ends."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ended = threading.Event()
        self.error = error

    def wait(self) -> None:
        assert self.ended.wait(20), "nobody ended the operation"
        if self.error is not None:
            raise self.error


def test_callbacks_run_in_the_order_of_submission_and_get_the_error() -> None:
    completer, seen, done = Completer("test"), [], threading.Event()
    operations = [_Operation(), _Operation(ValueError("broken")), _Operation()]
    for number, operation in enumerate(operations):
        completer.submit(operation.wait, lambda error, number=number: seen.append((number, str(error))))
    completer.submit(lambda: None, lambda _: done.set())
    for operation in reversed(operations):
        operation.ended.set()
    assert done.wait(20)
    assert seen == [(0, "None"), (1, "broken"), (2, "None")]
    completer.close()


def test_a_callback_may_wait_for_the_callbacks_of_later_operations_to_any_depth() -> None:
    completer, deepest = Completer("test"), threading.Event()

    def descend(depth: int) -> None:
        if depth == 12:
            deepest.set()
            return
        below = threading.Event()

        def complete(_: BaseException | None) -> None:
            descend(depth + 1)
            below.set()

        completer.submit(lambda: None, complete)
        assert below.wait(20), f"nobody served depth {depth}"

    completer.submit(lambda: None, lambda _: descend(0))
    assert deepest.wait(20)
    completer.close()


def test_a_few_threads_are_enough_for_callbacks_that_do_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("photinus.backend.completer._IDLE_S", 10.0)  # a loaded machine makes gaps between callbacks
    completer, threads, done = Completer("test"), set(), threading.Event()
    for _ in range(200):
        completer.submit(lambda: None, lambda _: threads.add(threading.current_thread()))
        time.sleep(0.0001)
    completer.submit(lambda: None, lambda _: done.set())
    assert done.wait(20)
    assert len(threads) <= 20  # 1 or 2, but for callbacks that a loaded machine interrupts
    completer.close()
    assert all(not thread.is_alive() for thread in threads)


def test_close_runs_what_was_submitted_and_leaves_no_thread() -> None:
    completer, seen = Completer("closing"), []
    for number in range(20):
        completer.submit(lambda: time.sleep(0.001), lambda _, number=number: seen.append(number))
    completer.close()
    assert seen == list(range(20))
    assert not [thread for thread in threading.enumerate() if "closing" in thread.name]


def test_an_idle_thread_holds_nothing_of_the_last_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    import gc
    import weakref

    class Memory:
        pass

    monkeypatch.setattr("photinus.backend.completer._IDLE_S", 60.0)  # a thread that ends lets go of all
    completer, done = Completer("test"), threading.Event()
    memory = Memory()
    gone = weakref.ref(memory)
    completer.submit(lambda memory=memory: None, lambda _: done.set())
    assert done.wait(20)
    del memory
    deadline = time.monotonic() + 10
    while gone() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None
    completer.close()


def test_no_thread_is_left_soon_after_the_last_callback_though_the_group_lives_on() -> None:
    completer, done = Completer("lasting"), threading.Event()
    completer.submit(lambda: None, lambda _: done.set())
    assert done.wait(20)
    deadline = time.monotonic() + 5
    while any("lasting" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread stays"
        time.sleep(0.01)
    done.clear()
    completer.submit(lambda: None, lambda _: done.set())  # and it serves again
    assert done.wait(20)
    completer.close()


def test_what_is_apart_waits_for_nobody_and_holds_up_nobody() -> None:
    completer, message, seen = Completer("apart"), _Operation(ValueError("lost")), []
    ended, done = threading.Event(), threading.Event()

    def complete(error: BaseException | None) -> None:
        seen.append(str(error))
        ended.set()

    completer.submit_apart(message.wait, complete)
    completer.submit(lambda: None, lambda _: done.set())
    assert done.wait(20)
    message.ended.set()
    assert ended.wait(20)
    assert seen == ["lost"]
    completer.close()
    assert not [thread for thread in threading.enumerate() if "apart" in thread.name]


def test_a_thread_without_callbacks_waits_until_those_that_may_exchange_have_run() -> None:
    completer, go_on, seen = Completer("test"), threading.Event(), []

    def complete(_: BaseException | None) -> None:
        completer.settle(20)  # inside a callback: goes on
        go_on.wait(20)
        seen.append("callback")

    completer.submit(lambda: None, complete, True)
    threading.Timer(0.1, go_on.set).start()
    completer.settle(20)
    assert seen == ["callback"]
    assert completer.unsettled == 0
    completer.close()


def test_callbacks_that_do_not_end_are_given_up_once_with_a_warning() -> None:
    completer, go_on = Completer("test"), threading.Event()
    completer.submit(lambda: None, lambda _: go_on.wait(20), True)
    with pytest.warns(
        RuntimeWarning, match=r"group test: callbacks of earlier collectives have not ended within 0.01 s"
    ):
        completer.settle(0.01)
    completer.settle(0.01)  # not again
    go_on.set()
    completer.close()
    assert completer.unsettled == 0


def test_callbacks_of_two_groups_do_not_wait_for_each_other() -> None:
    first, second = Completer("first"), Completer("second")
    both, settled = threading.Barrier(2), []

    def complete(_: BaseException | None, other: Completer) -> None:
        both.wait(20)
        other.settle(20)
        settled.append(other.unsettled)
        both.wait(20)

    began_s = time.monotonic()
    first.submit(lambda: None, partial(complete, other=second), True)
    second.submit(lambda: None, partial(complete, other=first), True)
    first.settle(20)
    second.settle(20)
    assert settled == [1, 1]
    assert time.monotonic() - began_s < 10
    first.close()
    second.close()
