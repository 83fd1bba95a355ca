"""Ranks that srun, mpirun or nobody in particular started find each other, and nobody else."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from photinus.backend import hosts
from photinus.errors import NotInitializedError
from photinus.job.rendezvous import RendezvousAddress
from photinus.job.world import World
from photinus.trainer.session import rank_store
from photinus.trainer.session.rank_store import open_store
from tests.ranks import RankResult, run_ranks


def place(rank: int, world_size: int) -> World:
    return World(rank, world_size, rank, world_size, 0, "Slurm")


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("late_s", [0.0, 0.5], ids=["together", "rank 0 last"])
def test_all_ranks_come_to_one_store(port: int, late_s: float) -> None:
    with ThreadPoolExecutor(3) as ranks:
        here = RendezvousAddress("127.0.0.1", port, "job")
        others = [ranks.submit(open_store, place(rank, 3), here, 30.0) for rank in (1, 2)]
        time.sleep(late_s)
        stores = [open_store(place(0, 3), here, 30.0), *(other.result() for other in others)]
    for rank, store in enumerate(stores):
        store.set(f"rank {rank}", str(rank))
    assert [stores[1].get(f"rank {rank}") for rank in range(3)] == [b"0", b"1", b"2"]


def refused(rank: int, world_size: int, rendezvous: RendezvousAddress, timeout_s: float = 20.0) -> tuple[str, float]:
    """What a rank says when it cannot come in, and after how many seconds."""
    begun = time.monotonic()
    with pytest.raises(NotInitializedError) as error:
        open_store(place(rank, world_size), rendezvous, timeout_s)
    return str(error.value), time.monotonic() - begun


def test_a_port_that_is_taken_is_named_at_once(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        said, took_s = refused(0, 2, RendezvousAddress("127.0.0.1", port, "job"))
    assert f"127.0.0.1:{port}" in said
    assert "Address already in use" in said
    assert "MASTER_PORT" in said
    assert took_s < 3.0


@contextlib.contextmanager
def squatter(port: int, answer: bytes | None) -> Iterator[None]:
    """Something else at the port: answers with these bytes, or (None) stays silent with the connection open."""
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", port)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    if answer is None:
                        kept.append(connection)
                        continue
                    with connection:
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in kept:
                connection.close()


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"", None], ids=["ssh", "closes", "silent"])
def test_something_else_at_the_port_is_an_error_when_the_time_is_over(port: int, answer: bytes | None) -> None:
    with squatter(port, answer):
        said, took_s = refused(1, 2, RendezvousAddress("127.0.0.1", port, "job"), timeout_s=1.0)
    assert f"rank 1 (pid {os.getpid()} on" in said
    assert f"the store at 127.0.0.1:{port}" in said
    assert "If another program, or another rank 0, holds the port" in said
    assert "set MASTER_PORT to a free one for all ranks" in said
    assert took_s < 10.0


@contextlib.contextmanager
def rank_0(port: int, world_size: int) -> Iterator[None]:
    """Rank 0 of a job in a thread. In the block the other ranks have to come."""
    with ThreadPoolExecutor(1) as pool:
        store = pool.submit(open_store, place(0, world_size), RendezvousAddress("127.0.0.1", port, "job"), 30.0)
        yield
        store.result()


def test_ranks_of_another_job_at_the_port_do_not_join_and_name_rank_0_when_the_time_is_over(port: int) -> None:
    with rank_0(port, 2):
        said, _ = refused(1, 2, RendezvousAddress("127.0.0.1", port, "other"), timeout_s=0.5)
        assert "rank 0 did not join" in said
        assert f"another job at that port (127.0.0.1:{port}): set MASTER_PORT to a free one" in said
        open_store(place(1, 2), RendezvousAddress("127.0.0.1", port, "job"), 10.0)


def test_ranks_of_another_world_are_refused_with_both_numbers(port: int) -> None:
    with rank_0(port, 2):
        said, _ = refused(1, 4, RendezvousAddress("127.0.0.1", port, "job"))
        assert "rank 0 expects 2 ranks, and this is rank 1 of 4" in said
        open_store(place(1, 2), RendezvousAddress("127.0.0.1", port, "job"), 10.0)


def test_with_a_secret_only_those_join_that_know_it(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOTINUS_JOB_SECRET", "a")
    with rank_0(port, 2):
        wait_for_listener(port).close()
        monkeypatch.setenv("PHOTINUS_JOB_SECRET", "b")
        assert "rank 0 did not join" in refused(1, 2, RendezvousAddress("127.0.0.1", port, "job"), timeout_s=0.5)[0]
        monkeypatch.setenv("PHOTINUS_JOB_SECRET", "a")
        open_store(place(1, 2), RendezvousAddress("127.0.0.1", port, "job"), 10.0)


def test_rank_0_listens_on_the_address_of_the_ranks_alone(port: int) -> None:
    with rank_0(port, 2):
        wait_for_listener(port).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5.0)
        open_store(place(1, 2), RendezvousAddress("127.0.0.1", port, "job"), 10.0)


def test_a_second_session_of_a_process_has_keys_of_its_own_in_the_store_of_the_first(port: int) -> None:
    here = RendezvousAddress("127.0.0.1", port, "job")
    with ThreadPoolExecutor(1) as rank_1:
        for turn in range(3):
            other = rank_1.submit(open_store, place(1, 2), here, 30.0)
            time.sleep(0.3)  # it finds the session before
            store = open_store(place(0, 2), here, 30.0)
            assert not store.check(["turn"])
            store.set("turn", str(turn))
            assert other.result().get("turn") == str(turn).encode()


def test_a_rank_of_the_next_program_waits_while_rank_0_of_the_one_before_still_runs(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = RendezvousAddress("127.0.0.1", port, "job")
    with rank_0(port, 2):
        open_store(place(1, 2), here, 10.0)
    monkeypatch.setattr(rank_store, "_sessions", set())  # another process, which knows nothing of that session
    with ThreadPoolExecutor(1) as rank_1:
        other = rank_1.submit(open_store, place(1, 2), here, 30.0)
        time.sleep(0.5)
        assert not other.done()
        open_store(place(0, 2), here, 30.0).set("who", "next")
        assert other.result().get("who") == b"next"
    monkeypatch.setattr(rank_store, "_sessions", set())
    said, _ = refused(1, 2, here, timeout_s=1.0)
    assert f"the session there is complete, and has pid {os.getpid()} on" in said


def test_rank_0_names_the_ranks_that_did_not_come(port: int) -> None:
    said, _ = refused(0, 3, RendezvousAddress("127.0.0.1", port, "job"), timeout_s=0.3)
    assert "ranks 1, 2 did not join; rank 0 (pid" in said
    assert f"Rank 0 is at 127.0.0.1:{port}" in said


def test_a_caller_that_says_nothing_or_too_much_holds_nobody_up(port: int) -> None:
    with rank_0(port, 2):
        silent = [wait_for_listener(port) for _ in range(3)]
        with wait_for_listener(port) as loud:
            loud.sendall(b"x" * 5000)
            open_store(place(1, 2), RendezvousAddress("127.0.0.1", port, "job"), 10.0)
        for connection in silent:
            connection.close()


def test_a_rank_that_waits_in_vain_says_for_whom(port: int) -> None:
    said, _ = refused(1, 2, RendezvousAddress("127.0.0.1", port, "job"), timeout_s=0.5)
    assert "rank 1 waited" in said
    assert f"for rank 0 at 127.0.0.1:{port}: [Errno 111] Connection refused" in said


def test_a_host_that_nobody_knows_is_named(port: int) -> None:
    said, _ = refused(
        1, 2, RendezvousAddress("no-such-host.invalid", port, "job", ("a", "b"), "the job and step of Slurm")
    )
    assert "no-such-host.invalid" in said
    assert "MASTER_ADDR" in said


def wait_for_listener(port: int) -> socket.socket:
    """A connection to the port, as soon as somebody listens there."""
    deadline = time.monotonic() + 10.0
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5.0)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


# --- RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT alone --------------------------------------------------------------


def by_environment(port: int, ranks: list[int], world_size: int, **expect: Any) -> list[RankResult]:
    """Processes with these ranks, as somebody starts them by hand; exit code 1 wherever there is an error."""
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PHOTINUS_WAITING_S": "0.5", **expect}
    return run_ranks(
        f"{__name__}:_init",
        world_size=len(ranks),
        environ=environ,
        arguments={"ranks": ranks, "of": world_size},
        expect=dict.fromkeys(range(len(ranks)), int(sorted(ranks) != list(range(world_size)))),
    )


def _init(rank: int, world_size: int, ranks: list[int], of: int) -> None:
    import torch

    import photinus

    os.environ.update(RANK=str(ranks[rank]), WORLD_SIZE=str(of), LOCAL_WORLD_SIZE=str(of), LOCAL_RANK=str(ranks[rank]))
    for backend in ("gloo", "photinus", "auto"):  # again in one process: the store of before may still be there
        with photinus.init(backend):
            dist.all_reduce(total := torch.ones(1))
            assert total.item() == of


def test_ranks_of_a_plain_environment_come_together_again_and_again(port: int) -> None:
    by_environment(port, [0, 1, 2], 3)


def test_ranks_of_a_plain_environment_say_who_has_come_and_who_has_not_and_end_so(port: int) -> None:
    for ended in by_environment(port, [0, 2], 3, PHOTINUS_TIMEOUT_S="3"):
        came = r"ranks 0 \(pid \d+ on \S+\), 2 \(pid \d+ on \S+\) joined"
        assert re.search(rf"has been waiting for \d+ s for rank 1 to join group world; {came}", ended.output)
        assert re.search(rf"NotInitializedError: .*rank 1 did not join; {came}", ended.output)
        assert "frame #" not in ended.output


def test_a_rank_that_two_processes_take_is_named_by_all(port: int) -> None:
    for ended in by_environment(port, [0, 1, 1], 3, PHOTINUS_TIMEOUT_S="20"):
        assert re.search(r"NotInitializedError: rank 1 is pid \d+ on \S+, and pid \d+ on \S+ says that", ended.output)


class Counting(dist.Store):
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = dist.HashStore(), 0

    def _ask(self, name: str, *given: Any) -> Any:
        self.calls += 1
        return getattr(self.inner, name)(*given)

    def set(self, *given: Any) -> None:
        self._ask("set", *given)

    def get(self, *given: Any) -> Any:
        return self._ask("get", *given)

    def add(self, *given: Any) -> Any:
        return self._ask("add", *given)

    def check(self, *given: Any) -> Any:
        return self._ask("check", *given)

    def compare_set(self, *given: Any) -> Any:
        return self._ask("compare_set", *given)


def test_ranks_do_not_ask_the_store_for_each_rank_once_all_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_LOOK_EVERY_S", 1e9)  # to name the missing ones, they do
    store, ranks = Counting(), 60
    with ThreadPoolExecutor(ranks) as threads:
        calls = [
            threads.submit(rank_store._call_roll, store, place(rank, ranks), "here", 60.0) for rank in range(ranks)
        ]
    assert len([call.result() for call in calls]) == ranks
    assert store.calls < ranks * ranks
