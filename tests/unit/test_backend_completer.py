"""The threads that complete futures."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from photinus import engine
from photinus.backend.work import Completer


@pytest.fixture(scope="module")
def pair() -> Iterator[list[engine.Communicator]]:
    """Two ranks in this process: a message between them is in flight until the test sends it."""
    address, other = engine.new_address(), []
    thread = threading.Thread(target=lambda: other.append(engine.Communicator(1, 2, address, timeout_s=60)))
    thread.start()
    with engine.Communicator(0, 2, address, timeout_s=60) as own:
        thread.join()
        with other[0]:
            yield [own, *other]


@pytest.fixture(scope="module")
def done() -> Iterator[engine.Work]:
    """A work that has ended."""
    with engine.Communicator(0, 1, engine.new_address()) as communicator:
        yield communicator.barrier()


def _nothing() -> None:
    pass


def test_callbacks_run_in_the_order_in_which_operations_end_and_get_the_error(
    pair: list[engine.Communicator], done: engine.Work
) -> None:
    completer, seen, over = Completer("test"), [], threading.Event()
    works = [pair[0].recv(np.empty(1, np.float32), 1, tag, asynchronous=True) for tag in range(3)]

    def finish(number: int) -> None:
        if number == 1:
            raise ValueError("broken")

    for number, work in enumerate(works):
        completer.submit(work, partial(finish, number), lambda error, number=number: seen.append((number, str(error))))
    completer.submit(done, _nothing, lambda _: over.set())
    assert over.wait(20)  # nobody stands in line behind those that have not ended
    assert seen == []
    for tag in (2, 1, 0):
        pair[1].send(np.ones(1, np.float32), 0, tag)
        works[tag].wait()
    completer.close()
    assert seen == [(2, "None"), (1, "broken"), (0, "None")]


def test_a_callback_may_wait_for_the_callbacks_of_later_operations_to_any_depth(done: engine.Work) -> None:
    completer, deepest = Completer("test"), threading.Event()

    def descend(depth: int) -> None:
        if depth == 12:
            deepest.set()
            return
        below = threading.Event()

        def complete(_: BaseException | None) -> None:
            descend(depth + 1)
            below.set()

        completer.submit(done, _nothing, complete)
        assert below.wait(20), f"nobody served depth {depth}"

    completer.submit(done, _nothing, lambda _: descend(0))
    assert deepest.wait(20)
    completer.close()


def test_a_few_threads_are_enough_for_callbacks_that_do_not_block(
    done: engine.Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("photinus.backend.work._IDLE_S", 10.0)  # a loaded machine makes gaps between callbacks
    completer, threads, over = Completer("test"), set(), threading.Event()
    for _ in range(200):
        completer.submit(done, _nothing, lambda _: threads.add(threading.current_thread()))
        time.sleep(0.0001)
    completer.submit(done, _nothing, lambda _: over.set())
    assert over.wait(20)
    assert len(threads) <= 20  # 1 or 2, but for callbacks that a loaded machine interrupts
    completer.close()
    assert all(not thread.is_alive() for thread in threads)


def test_close_runs_what_was_submitted_and_leaves_no_thread(done: engine.Work) -> None:
    completer, seen = Completer("closing"), []
    for number in range(20):
        completer.submit(done, lambda: time.sleep(0.001), lambda _, number=number: seen.append(number))
    completer.close()
    assert seen == list(range(20))
    assert not [thread for thread in threading.enumerate() if "closing" in thread.name]


def test_close_in_a_forked_child_waits_for_no_thread_of_its_parent(done: engine.Work) -> None:
    completer, over = Completer("test"), threading.Event()
    completer.submit(done, _nothing, lambda _: over.wait(20))
    if not (child := os.fork()):
        signal.alarm(10)
        completer.close(timeout_s=60)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    over.set()
    completer.close()


def test_an_idle_thread_holds_nothing_of_the_last_operation(done: engine.Work, monkeypatch: pytest.MonkeyPatch) -> None:
    import gc
    import weakref

    class Memory:
        pass

    monkeypatch.setattr("photinus.backend.work._IDLE_S", 60.0)  # a thread that ends lets go of all
    completer, over = Completer("test"), threading.Event()
    memory = Memory()
    gone = weakref.ref(memory)
    completer.submit(done, lambda memory=memory: None, lambda _: over.set())
    assert over.wait(20)
    del memory
    deadline = time.monotonic() + 10
    while gone() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None
    completer.close()


def test_no_thread_is_left_soon_after_the_last_callback_though_the_group_lives_on(done: engine.Work) -> None:
    completer, over = Completer("lasting"), threading.Event()
    completer.submit(done, _nothing, lambda _: over.set())
    assert over.wait(20)
    deadline = time.monotonic() + 5
    while any("lasting" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the thread stays"
        time.sleep(0.01)
    over.clear()
    completer.submit(done, _nothing, lambda _: over.set())  # and it serves again
    assert over.wait(20)
    completer.close()


def test_a_thread_without_callbacks_waits_until_those_that_may_exchange_have_run(done: engine.Work) -> None:
    completer, go_on, seen = Completer("test"), threading.Event(), []

    def complete(_: BaseException | None) -> None:
        completer.wait_for_callbacks(20)  # inside a callback: goes on
        go_on.wait(20)
        seen.append("callback")

    completer.submit(done, _nothing, complete, True)
    threading.Timer(0.1, go_on.set).start()
    completer.wait_for_callbacks(20)
    assert seen == ["callback"]
    assert completer.pending == 0
    completer.close()


def test_callbacks_that_do_not_end_are_given_up_once_with_a_warning(done: engine.Work) -> None:
    completer, go_on = Completer("test"), threading.Event()
    completer.submit(done, _nothing, lambda _: go_on.wait(20), True)
    with pytest.warns(RuntimeWarning, match=r"group test: callbacks of earlier collectives did not end within 0.01 s"):
        completer.wait_for_callbacks(0.01)
    completer.wait_for_callbacks(0.01)  # not again
    go_on.set()
    completer.close()
    assert completer.pending == 0


def _allow_starts(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """So many threads can be started from now on."""
    start, left = threading.Thread.start, [count]

    def limited(thread: threading.Thread) -> None:
        if left[0] == 0:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


def test_a_callback_that_no_thread_can_run_is_refused_and_never_called(
    done: engine.Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    completer, seen = Completer("test"), []
    _allow_starts(monkeypatch, 0)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        completer.submit(done, _nothing, lambda _: seen.append(1), True)
    assert completer.pending == 0
    monkeypatch.undo()
    completer.submit(done, _nothing, lambda _: seen.append(2))
    completer.close()
    assert seen == [2]


class _SignalError(Exception):
    """Raised by a signal's handler, as time limits of libraries do."""


def test_a_signal_that_comes_when_the_thread_has_started_is_not_hidden_by_another_error(
    done: engine.Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    completer, over = Completer("test"), threading.Event()
    name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    start = getattr(threading, name)

    def interrupted(*args: object, **keywords: object) -> None:
        start(*args, **keywords)
        while threading._limbo:  # the thread has not begun  # type: ignore[attr-defined]
            time.sleep(0.001)
        raise _SignalError

    monkeypatch.setattr(threading, name, interrupted)
    with pytest.raises(_SignalError):
        completer.submit(done, _nothing, lambda _: None, True)
    monkeypatch.undo()
    assert completer.pending == 0
    completer.submit(done, _nothing, lambda _: over.set())
    assert over.wait(20)
    completer.close()


def test_callbacks_that_only_one_thread_can_run_all_run(done: engine.Work, monkeypatch: pytest.MonkeyPatch) -> None:
    completer, go_on, over, refused = Completer("test"), threading.Event(), threading.Event(), []

    def complete(_: BaseException | None) -> None:
        go_on.wait(20)
        with pytest.raises(RuntimeError) as caught:  # it would wait for itself
            completer.submit(done, _nothing, lambda _: None)
        refused.append(str(caught.value))

    _allow_starts(monkeypatch, 1)
    completer.submit(done, _nothing, complete)
    for _ in range(3):
        completer.submit(done, _nothing, lambda _: None)
    completer.submit(done, _nothing, lambda _: over.set())
    go_on.set()
    assert over.wait(20)
    assert refused == ["can't start new thread"]
    completer.close()


def test_callbacks_of_two_groups_do_not_wait_for_each_other(done: engine.Work) -> None:
    first, second = Completer("first"), Completer("second")
    both, settled = threading.Barrier(2), []

    def complete(_: BaseException | None, other: Completer) -> None:
        both.wait(20)
        other.wait_for_callbacks(20)
        settled.append(other.pending)
        both.wait(20)

    began_s = time.monotonic()
    first.submit(done, _nothing, partial(complete, other=second), True)
    second.submit(done, _nothing, partial(complete, other=first), True)
    first.wait_for_callbacks(20)
    second.wait_for_callbacks(20)
    assert settled == [1, 1]
    assert time.monotonic() - began_s < 10
    first.close()
    second.close()
