"""The leader of several hosts over real sockets, with hosts that the test plays: forms, stores, verdicts, strangers.

And a host whose leader the test plays.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from photinus import __version__
from photinus.job import channel, client
from photinus.job.attempt import JobEndedError
from photinus.job.channel import answer, key_of
from photinus.job.client import SeveralHosts, dial
from photinus.job.deaths import Death, Raised
from photinus.job.membership import Membership
from photinus.job.own_address import listen
from photinus.job.relay import Relay
from photinus.job.restart_policy import Report, RestartPolicy
from photinus.job.server import Leader, serve_in_thread
from photinus.job.spec import HostSpec
from photinus.run.local.store import StoreProcess

KEY = key_of("secret", "job")
DEADLINE_S = 30.0


class Host:
    """A launcher's end, message by message."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, kind: str, **fields: Any) -> None:
        channel.write(self.writer, {"type": kind, **fields})

    async def hear(self, kind: str) -> dict[str, Any]:
        """The next message of this kind."""
        while True:
            message = await channel.read(self.reader)
            if message["type"] == kind:
                return message


async def host(port: int, name: str, *, leads: bool = False, **more: Any) -> Host:
    made = Host(*await dial("127.0.0.1", port, KEY, "host"))
    hello = {"version": __version__, "torch": "2", "host": name, "workers": 2, "node_rank": None, "nnodes": [2, 2]}
    made.say("hello", **{**hello, "launcher": name, "leads": leads, **more})
    made.say("ready")
    return made


def made(listener: socket.socket, said: list[str], heartbeat_timeout_s: float = 30.0) -> Leader:
    policy = RestartPolicy(1)
    rules = Membership(2, 2, 60.0, 1.0, heartbeat_timeout_s, spend_restart=policy.spend_restart)
    return Leader(KEY, listener, rules, policy, job_id="job", say=lambda text, _: said.append(text))


def with_leader(
    test: Callable[[int], Coroutine[Any, Any, None]], said: list[str] | None = None, heartbeat_timeout_s: float = 30.0
) -> None:
    async def run() -> None:
        listener = listen("127.0.0.1", 0)
        port: int = listener.getsockname()[1]
        said_by_leader = [] if said is None else said
        leader = made(listener, said_by_leader, heartbeat_timeout_s)
        await leader.open()
        try:
            await test(port)
        finally:
            await leader.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


async def shouted(port: int) -> bytes:
    """What a server answers to b"hello"; empty when it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"hello")
    try:
        return await reader.read(100)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def store() -> asyncio.Server:
    """Stands for an attempt's store: answers in capitals."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data.upper())
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


def failure() -> dict[str, Any]:
    death = Death(2, 0, 7, "b", 1, 0.0, 1.0, raised=Raised((("OSError", "disk"),), "Traceback ..."))
    return Report((death,), (), steps=1).to_json()


def test_workers_reach_the_store_of_their_attempt_and_those_of_an_earlier_one_are_refused():
    said: list[str] = []

    async def test(port: int) -> None:
        first, second = await host(port, "a", leads=True), await host(port, "b")
        server = await store()
        form = await first.hear("form")
        assert (form["workers"], form["host_rank"], form["attempt"], form["hosts_store"]) == ([2, 2], 0, 0, True)
        first.say("store", port=server.sockets[0].getsockname()[1])
        form = await second.hear("form")
        assert (form["host_rank"], form["hosts_store"]) == (1, False)
        old = Relay("127.0.0.1", port, KEY, form["token"])
        old_port = await old.open()
        assert await shouted(old_port) == b"HELLO"
        stranger = Relay("127.0.0.1", port, key_of("guess", "job"), form["token"])
        assert await shouted(await stranger.open()) == b""

        second.say("report", report=failure())
        await first.hear("stop")
        first.say("report", report=Report((), ()).to_json())
        verdict = await second.hear("verdict")
        assert (verdict["restart"], verdict["rank"], verdict["host"]) == (True, 2, "b")
        assert "rank 2 (pid 7) raised OSError: disk" in said[-1]
        for each in (first, second):
            each.say("ready")
        await first.hear("form")
        first.say("store", port=server.sockets[0].getsockname()[1])
        form = await second.hear("form")
        assert form["attempt"] == 1
        new = Relay("127.0.0.1", port, KEY, form["token"])
        assert await shouted(await new.open()) == b"HELLO"
        assert await shouted(old_port) == b""
        for relay in (old, new, stranger):
            await relay.close()
        server.close()
        for each in (first, second):
            each.say("finished")
        assert (await second.hear("end"))["exit_code"] == 0
        for each in (first, second):
            each.writer.close()

    with_leader(test, said)


def test_a_host_of_another_version_is_refused_with_both():
    async def test(port: int) -> None:
        other = await host(port, "b", version="0.0.9")
        end = await other.hear("end")
        assert end["exit_code"] == 2
        assert f"b has photinus 0.0.9, the host that leads has {__version__}" in end["reason"]
        other.writer.close()

    with_leader(test)


def test_another_torch_is_let_in_with_a_warning():
    said: list[str] = []

    async def test(port: int) -> None:
        first, second = await host(port, "a", leads=True), await host(port, "b", torch="3")
        await first.hear("form")
        assert said[0] == "photinus: host b has torch 3, but another host has 2: results may differ, or ranks fail\n"
        for each in (first, second):
            each.writer.close()

    with_leader(test, said)


def test_only_the_host_that_leads_says_where_the_store_is():
    async def test(port: int) -> None:
        first, second = await host(port, "a", leads=True), await host(port, "b")
        await first.hear("form")
        second.say("store", port=1)
        assert "host b (127.0.0.1) sent an invalid message" in (await first.hear("end"))["reason"]
        for each in (first, second):
            each.writer.close()

    with_leader(test)


def test_a_host_that_sends_nonsense_is_lost_and_the_other_is_told():
    async def test(port: int) -> None:
        first, second = await host(port, "a", leads=True), await host(port, "b")
        await first.hear("form")
        second.writer.write((5).to_bytes(4, "big") + b"\x80\x04\x95\x00\x00")  # the beginning of a pickle
        end = await first.hear("end")
        assert end["exit_code"] == 1
        assert "host b (127.0.0.1) sent an invalid message: not JSON" in end["reason"]
        for each in (first, second):
            each.writer.close()

    with_leader(test)


def test_a_host_that_comes_back_before_it_was_missed_takes_its_own_place_and_costs_a_restart():
    said: list[str] = []

    async def test(port: int) -> None:
        first, second = await host(port, "a", leads=True), await host(port, "b")
        await first.hear("form")
        back = await host(port, "b")
        await first.hear("regroup")
        assert "photinus: host b (127.0.0.1) was lost, and joins again (restart 1 of 1): the present hosts" in said[-1]
        first.say("ready")
        assert (await first.hear("form"))["attempt"] == 1
        third = await host(port, "b")
        end = await third.hear("end")
        assert (end["reason"], end["exit_code"]) == ("this host cannot join: the job has ended", 2)
        assert (await first.hear("end"))["reason"] == "host b (127.0.0.1) was lost, and joins again"
        for each in (first, second, back, third):
            each.writer.close()

    with_leader(test, said)


def test_a_leader_that_goes_is_named_to_the_others():
    async def test(port: int) -> None:
        first, second = await host(port, "a", leads=True), await host(port, "b")
        await first.hear("form")
        first.say("leave", reason="exited because of SIGINT", exit_code=130)
        end = await second.hear("end")
        assert (end["reason"], end["exit_code"]) == ("host a (127.0.0.1) exited because of SIGINT", 130)
        for each in (first, second):
            each.writer.close()

    with_leader(test)


def test_a_leader_that_ends_before_it_has_workers_says_so():
    heard: list[str] = []

    async def test(port: int) -> None:
        other = await host(port, "b")

        async def hear() -> None:
            heard.append((await other.hear("end"))["reason"])
            other.writer.close()

        hearing.append(asyncio.ensure_future(hear()))
        await asyncio.sleep(0.1)  # the leader knows the host now

    hearing: list[asyncio.Future[None]] = []
    with_leader(test)
    assert heard == ["the host that leads ended before it started workers"]


@pytest.mark.timeout(20)
def test_a_leader_that_cannot_begin_says_so_where_it_is_started() -> None:
    with socket.socket(type=socket.SOCK_DGRAM) as wrong:  # any error of asyncio's will do
        with pytest.raises(ValueError, match="Stream Socket"), serve_in_thread(made(wrong, [])):
            pass


class PlayedLeader:
    """Lets a host in each time it comes; `dials` are its attempts, of which `delays` says what holds one up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, delays: dict[int, Callable[[], None]]) -> None:
        self.dials = 0
        self.came: asyncio.Queue[Host] = asyncio.Queue()

        async def watched(*given: Any, **named: Any) -> Any:
            self.dials += 1
            await asyncio.to_thread(delays.get(self.dials, lambda: None))
            return await dial(*given, **named)

        monkeypatch.setattr(client, "dial", watched)

    @contextlib.asynccontextmanager
    async def host(self, heartbeat_timeout_s: float) -> AsyncIterator[SeveralHosts]:
        """A host that has said hello to the first."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            caller = await answer(reader, writer, KEY, timeout_s=DEADLINE_S)
            assert caller is not None
            caller.accept()
            self.came.put_nowait(Host(reader, writer))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        hosts = HostSpec((2, 2), join_timeout_s=DEADLINE_S, heartbeat_timeout_s=heartbeat_timeout_s)
        lead = False, "127.0.0.1", port
        peers = SeveralHosts(hosts, 2, KEY, lead=lambda: lead, comes_back=True, say=print, store=StoreProcess())
        serving = serve_in_thread(peers)
        await asyncio.to_thread(serving.__enter__)
        try:
            yield peers
        finally:
            await asyncio.to_thread(serving.__exit__, None, None, None)
            os.close(peers.fd)
            while not self.came.empty():
                self.came.get_nowait().writer.close()
            server.close()


def test_a_host_dials_a_silent_leader_again_until_it_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable() -> None:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    async def test() -> None:
        leader = PlayedLeader(monkeypatch, {2: unreachable})
        async with leader.host(heartbeat_timeout_s=1.5) as coming:
            silent = await leader.came.get()
            meeting = asyncio.ensure_future(asyncio.to_thread(coming.meet, lambda: None))
            again = await leader.came.get()
            again.say("beat")
            await again.hear("ready")
            assert leader.dials == 3
            again.say("end", reason="enough", exit_code=0)
            with pytest.raises(JobEndedError, match="enough"):
                await meeting
            for each in (silent, again):
                each.writer.close()

    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


def test_workers_of_a_host_that_does_not_lead_find_the_store_behind_a_relay_of_each_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    form = {"workers": [2, 2], "host_rank": 1, "job_id": "job", "restarts": 0, "hosts_store": False, "token": "t"}
    monkeypatch.setattr(StoreProcess, "open", lambda *_: pytest.fail("the store is on the leader's host"))

    async def test() -> None:
        leader = PlayedLeader(monkeypatch, {})
        async with leader.host(heartbeat_timeout_s=DEADLINE_S) as peers:
            played = await leader.came.get()
            ports = []
            for attempt in range(2):
                meeting = asyncio.ensure_future(asyncio.to_thread(peers.meet, lambda: None))
                await played.hear("ready")
                played.say("form", attempt=attempt, **form)
                members = await meeting
                assert (members.first_rank, members.attempt, members.world_size) == (2, attempt, 4)
                ports.append(members.store_port)
                (await asyncio.open_connection("127.0.0.1", ports[-1]))[1].close()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", ports[0])
            played.writer.close()

    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


def test_what_a_host_had_to_say_to_a_lost_leader_is_not_told_to_the_one_it_finds_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        lost, has_said = threading.Event(), threading.Event()
        leader = PlayedLeader(monkeypatch, {2: lambda: (lost.set(), has_said.wait(DEADLINE_S))})
        async with leader.host(heartbeat_timeout_s=DEADLINE_S) as coming:
            (await leader.came.get()).writer.close()
            assert await asyncio.to_thread(lost.wait, DEADLINE_S)
            coming.report_finished()
            has_said.set()
            again = await leader.came.get()
            meeting = asyncio.ensure_future(asyncio.to_thread(coming.meet, lambda: None))
            heard = [(await channel.read(again.reader))["type"] for _ in range(2)]
            assert heard == ["hello", "ready"]
            again.say("end", reason="enough", exit_code=0)
            with pytest.raises(JobEndedError, match="enough"):
                await meeting
            again.writer.close()

    asyncio.run(asyncio.wait_for(test(), DEADLINE_S))


def test_a_host_that_is_started_again_before_its_silence_is_noticed_gets_its_place_back(monkeypatch):
    monkeypatch.setattr("photinus.job.server._SILENT_S", 0.3)
    said: list[str] = []

    async def run(port: int) -> None:
        async def beat(of: Host) -> None:
            while True:
                of.say("beat")
                await asyncio.sleep(0.1)

        first, silent = await host(port, "a", leads=True), await host(port, "b")
        beating = asyncio.ensure_future(beat(first))
        assert (await first.hear("form"))["attempt"] == 0
        await asyncio.sleep(0.5)
        again = await host(port, "b", launcher="another")
        await first.hear("regroup")  # when the heartbeat's time is over
        first.say("ready")
        assert (await first.hear("form"))["attempt"] == 1
        first.say("store", port=1)
        assert (await again.hear("form"))["host_rank"] == 1
        beating.cancel()
        silent.writer.close()

    with_leader(run, said, heartbeat_timeout_s=1.5)
    assert "photinus: host b (127.0.0.1) waits until a silent host gives up its place\n" in said
