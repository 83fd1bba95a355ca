"""The process that holds the workers' store: torch's TCPStore."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from photinus.job.attempt import ended
from photinus.run.local.job import LOOPBACK
from photinus.run.local.store import StoreProcess, _is_stopped


@pytest.fixture
def store() -> Iterator[StoreProcess]:
    with closing(StoreProcess()) as store:
        yield store


def client_of(port: int) -> TCPStore:
    return TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=30))


def wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_workers_find_a_store_and_after_a_restart_a_fresh_one(store: StoreProcess) -> None:
    port = store.open()
    first = client_of(port)
    first.set("address", "of a rank")
    assert first.get("address") == b"of a rank"
    theirs = client_of(store.open(port))  # which the first one has left
    assert not theirs.check(["address"])


def test_workers_hear_which_ranks_have_ended(store: StoreProcess) -> None:
    theirs = client_of(store.open())
    store.tell_ended([0, 2])
    wait_until(lambda: ended(theirs) == {0, 2})


def test_a_store_that_is_stopped_is_named_once_each_time() -> None:
    lines: list[str] = []
    with closing(StoreProcess(None, lines.append)) as store:
        client_of(store.open()).set("it", "runs")
        process = store._process
        assert process is not None
        for count in (1, 2):
            os.kill(process.pid, signal.SIGSTOP)
            wait_until(lambda: _is_stopped(process.pid))
            assert [store.loss(), store.loss()] == ["", ""]
            assert len(lines) == count
            assert f"(pid {process.pid}) is stopped" in lines[-1]
            assert f"kill -CONT {process.pid}" in lines[-1]
            os.kill(process.pid, signal.SIGCONT)
            wait_until(lambda: not _is_stopped(process.pid))
            assert store.loss() == ""
