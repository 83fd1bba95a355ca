"""The process that holds the workers' store: torch's TCPStore, without torch's Python where that goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from photinus.job.attempt import ended
from photinus.run.local.store import LOOPBACK, StoreProcess

WITHOUT_PIECES = """
import os
class TCPStore:
    def __init__(self, host, port, **options):
        os.close(options["master_listen_fd"])
        open(os.environ["TOLD"], "w").write(host)
"""


@pytest.fixture
def store() -> Iterator[StoreProcess]:
    with closing(StoreProcess()) as store:
        yield store


def words_of(store: StoreProcess) -> list[bytes]:
    assert store._process is not None
    return Path(f"/proc/{store._process.pid}/cmdline").read_bytes().split(b"\0")


def client_of(port: int) -> TCPStore:
    return TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=30))


def test_workers_find_a_store_and_after_a_restart_a_fresh_one(store: StoreProcess) -> None:
    port = store.open()
    first = client_of(port)
    first.set("address", "of a rank")
    assert first.get("address") == b"of a rank"
    theirs = client_of(store.open(port))  # which the first one has left
    assert not theirs.check(["address"])
    assert b"whole" not in words_of(store), "this torch's C++ does not come without its Python: all starts are slower"


def test_workers_hear_which_ranks_have_ended(store: StoreProcess) -> None:
    theirs = client_of(store.open())
    store.tell_ended([0, 2])
    deadline = time.monotonic() + 30
    while ended(theirs) != {0, 2}:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_torch_whose_parts_do_not_load_alone_is_imported_whole(
    store: StoreProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("")
    (tmp_path / "torch" / "distributed.py").write_text(WITHOUT_PIECES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    store.open()
    assert store._close_store()  # it answers, and so has opened one before
    assert (tmp_path / "told").read_text() == LOOPBACK
    assert b"whole" in words_of(store)
