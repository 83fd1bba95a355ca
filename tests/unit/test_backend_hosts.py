"""How ranks find one another in the store. Threads stand for ranks; the store is the process's own."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from photinus import engine
from photinus.backend import hosts
from photinus.errors import CollectiveTimeoutError, PeerLostError


def _meet_all(store: Any, ranks: range, world_size: int, timeout_s: float = 20.0) -> dict[int, Any]:
    """What each rank's meet() returned or raised."""
    results: dict[int, Any] = {}

    def meet(rank: int) -> None:
        try:
            results[rank] = hosts.meet(store, rank, world_size, timeout_s=timeout_s, name="test")
        except (RuntimeError, OSError) as error:
            results[rank] = error

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_ranks_of_one_host_agree_on_a_fresh_session_and_address_each_time() -> None:
    store, sessions = dist.HashStore(), set()
    for _ in range(5):
        meetings = _meet_all(store, range(4), 4)
        assert len({str(rendezvous) for rendezvous in meetings.values()}) == 1
        assert meetings[0].one_host
        assert meetings[0].address
        assert [member.pid for member in meetings[0].members] == [meetings[0].members[0].pid] * 4
        sessions.add(meetings[0].session)
        hosts.tidy(store, meetings[0])
        private = dist.PrefixStore("photinus", store)
        assert not private.check([f"session/{meetings[0].session}/plan"])  # it held the address, which is a secret
    assert len(sessions) == 5


@pytest.fixture
def several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread is on host a or b, in turn, and listens where nobody comes."""
    of_thread: dict[int, str] = {}

    def host_id() -> str:
        return of_thread.setdefault(threading.get_ident(), "a" if len(of_thread) % 2 else "b")

    monkeypatch.setattr(engine, "host_id", host_id)
    monkeypatch.setattr(
        engine, "listen", lambda addresses: [f"{address}:{threading.get_ident()}" for address in addresses]
    )


@pytest.mark.usefixtures("several_hosts")
def test_ranks_of_several_hosts_learn_where_each_listens_and_of_rank_0s_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "night")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    store = dist.HashStore()
    meetings = _meet_all(store, range(3), 3)
    assert len({str(rendezvous) for rendezvous in meetings.values()}) == 1
    rendezvous = meetings[0]
    assert (rendezvous.job, rendezvous.attempt, rendezvous.one_host) == ("night", 3, False)
    assert rendezvous.address
    places = rendezvous.places()
    assert sorted(place.host_key for place in places)[0::2] == ["a", "b"]
    assert all(place.links[0].startswith("127.0.0.1:") for place in places)
    assert len({place.links[0] for place in places}) == 3
    text = rendezvous.hosts()
    assert text.startswith("2 hosts: ")
    assert "[a] (rank" in text
    assert "[b] (rank" in text
    assert text.count("; lo)") == 2
    hosts.tidy(store, rendezvous)
    private = dist.PrefixStore("photinus", store)
    assert not any(private.check([f"session/{rendezvous.session}/links{part}"]) for part in ("", "/1", "/2"))


@pytest.mark.usefixtures("several_hosts")
@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_cannot_listen_says_so_to_all_at_once(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    threads: list[int] = []

    def listen(addresses: list[str]) -> list[str]:
        threads.append(threading.get_ident())
        if len(threads) == 1 + number:
            raise OSError("ulimit -n is 8")
        return ["127.0.0.1:1"]

    monkeypatch.setattr(engine, "listen", listen)
    began = time.monotonic()
    raised = _meet_all(dist.HashStore(), range(3), 3)
    assert time.monotonic() - began < 10
    errors = [error for error in raised.values() if isinstance(error, PeerLostError)]
    assert len(errors) == 2
    assert sum(isinstance(error, OSError) for error in raised.values()) == 1
    assert all("cannot be reached by other hosts: ulimit -n is 8" in str(error) for error in errors)


def test_keys_of_dead_attempts_are_not_taken_for_ranks() -> None:
    store = dist.HashStore()
    private = dist.PrefixStore("photinus", store)
    private.set("hello/0", "0123")
    private.set("hello/1", "4567")
    private.set("welcome/4567", "0123")
    private.set("session/0123/1", json.dumps({"host_id": "gone", "host_name": "gone", "pid": 1}))
    results: dict[int, Any] = {}
    late = threading.Timer(0.3, lambda: results.update(_meet_all(store, range(1, 2), 2)))
    late.start()
    results.update(_meet_all(store, range(1), 2))
    late.join(30)
    deadline = time.monotonic() + 30
    while len(results) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert results[0] == results[1]
    assert "gone" not in str(results[0])


def test_those_who_do_not_come_are_named_by_everyone() -> None:
    results = _meet_all(dist.HashStore(), range(2), 4, timeout_s=0.5)
    for rank in range(2):
        assert isinstance(results[rank], CollectiveTimeoutError)
        assert "ranks 2, 3 did not join" in str(results[rank])
    results = _meet_all(dist.HashStore(), range(1, 3), 3, timeout_s=0.5)
    assert "rank 0 did not join" in str(results[1])


def test_a_store_whose_server_has_gone_is_told_as_such() -> None:
    class Gone(dist.Store):
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Connection reset by peer")

        def set(self, key: str, value: bytes) -> None:
            raise dist.DistNetworkError("Connection reset by peer")

    with pytest.raises(PeerLostError, match=r"rendezvous store failed.*Connection reset"):
        hosts.meet(Gone(), 0, 2, timeout_s=1.0, name="test")


def test_one_rank_meets_itself_without_the_store() -> None:
    rendezvous = hosts.meet(None, 0, 1, timeout_s=0.1, name="test")  # type: ignore[arg-type]
    assert rendezvous.one_host
    assert rendezvous.address
