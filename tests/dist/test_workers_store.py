"""The process that holds the workers' store: torch's TCPStore."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from photinus.job.attempt import ended
from photinus.run.local.job import LOOPBACK
from photinus.run.local.store import StoreProcess


@pytest.fixture
def store() -> Iterator[StoreProcess]:
    with closing(StoreProcess()) as store:
        yield store


def client_of(port: int) -> TCPStore:
    return TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=30))


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
    deadline = time.monotonic() + 30
    while ended(theirs) != {0, 2}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
