"""Ports, secrets and messages between the launchers of several hosts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable

import pytest

from photinus.errors import LaunchError, UsageError
from photinus.job import channel, client, own_address
from photinus.job.channel import HandshakeError, RefusedError, answer, key_of, prove
from photinus.job.deaths import Death, Raised
from photinus.job.own_address import PortTakenError, listen, local_addresses_of
from photinus.job.restart_policy import Report
from photinus.job.spec import HostSpec, JobSpec, Program
from photinus.run.local import join
from photinus.run.local.job import Job
from photinus.run.local.store import StoreProcess


def test_a_taken_port_is_named_with_how_to_find_its_holder():
    for taken in (listen("127.0.0.1", 0), socket.create_server(("", 0))):
        with taken:
            port = taken.getsockname()[1]
            with pytest.raises(PortTakenError, match=rf"port {port} of 127\.0\.0\.1 is taken by another .*ss -ltnp"):
                listen("127.0.0.1", port)


def test_an_address_of_another_host_cannot_be_listened_on():
    with pytest.raises(LaunchError, match=r"cannot listen on 192\.0\.2\.1 port 1234"):
        listen("192.0.2.1", 1234)


def test_own_addresses_are_told_from_others():
    assert local_addresses_of("127.0.0.1") == ["127.0.0.1"]
    assert "127.0.0.1" in local_addresses_of("localhost")
    assert local_addresses_of("192.0.2.1") == []


def test_a_host_is_met_where_others_reach_it_by_ipv4_first_and_on_loopback_when_it_is_alone(monkeypatch):
    names = {"node1": ["127.0.1.1", "fd00::7", "10.0.0.7"], "gpu": ["127.0.1.1"], "10.0.0.7": ["10.0.0.7"]}
    monkeypatch.setattr(own_address, "local_addresses_of", names.__getitem__)
    monkeypatch.setattr(own_address, "listen", lambda address, port: address)

    def met(name, otherwise=None, alone=False):
        return own_address.listen_as(name, 1, or_another=False, otherwise=otherwise, alone=alone)

    assert met("node1") == "10.0.0.7"
    assert met("gpu", otherwise="10.0.0.7") == "10.0.0.7"
    assert met("gpu", otherwise="10.0.0.7", alone=True) == "127.0.1.1"
    with pytest.raises(LaunchError, match=r"other hosts cannot reach gpu: it resolves to 127\.0\.1\.1 there"):
        met("gpu")


def meet(server_key: bytes, client_key: bytes, purpose: str = "host", *, refuse: str | None = None) -> str:
    """What the server hears from the client; raises what the client raises."""

    async def both() -> str:
        heard: list[str] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            caller = await answer(reader, writer, server_key, timeout_s=5)
            if caller is not None and refuse is not None:
                await caller.refuse(refuse)
            elif caller is not None:
                heard.append(caller.purpose)
                caller.accept()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                await prove(reader, writer, client_key, purpose, timeout_s=5)
            finally:
                writer.close()
        return heard[0]

    return asyncio.run(both())


def test_who_knows_the_secret_is_let_in_and_heard():
    assert meet(key_of("s", "job"), key_of("s", "job"), "store 12") == "store 12"


@pytest.mark.parametrize("other", [key_of("t", "job"), key_of("s", "other job"), key_of("", "")])
def test_another_secret_or_job_is_refused(other):
    with pytest.raises(RefusedError, match="this port belongs to a different job"):
        meet(key_of("s", "job"), other)


def test_a_reason_travels_to_the_refused():
    with pytest.raises(RefusedError, match="that attempt is over"):
        meet(key_of("s", "j"), key_of("s", "j"), refuse="that attempt is over")


def dial_a_stranger(serve: Callable[[socket.socket], None]) -> str:
    """What the client says about a server that is no Photinus."""
    with listen("127.0.0.1", 0) as listener:

        def accept() -> None:
            connection, _ = listener.accept()
            with connection:
                serve(connection)

        thread = threading.Thread(target=accept)
        thread.start()

        async def dial() -> None:
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            try:
                await prove(reader, writer, key_of("s", "j"), "host", timeout_s=0.5)
            finally:
                writer.close()

        with pytest.raises(HandshakeError) as told:
            asyncio.run(dial())
        thread.join(5)
    return str(told.value)


def test_strangers_behind_the_port_are_told_apart():
    assert dial_a_stranger(lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) == (
        "it answers 'HTTP/1.1 400 Bad Request', which is not Photinus"
    )
    assert dial_a_stranger(lambda connection: None) == "it closed the connection"
    silent = dial_a_stranger(lambda connection: [*iter(lambda: connection.recv(4096), b"")])  # until the client closes
    assert silent == "it accepts the connection and sends nothing for 0.5 s"
    assert "is not Photinus" in dial_a_stranger(lambda connection: connection.sendall(os.urandom(4096)))
    impostor = b"PHOTINUS-JOB/1\n" + bytes(32)
    assert "cannot prove it" in dial_a_stranger(lambda connection: connection.sendall(impostor + b"+" + bytes(32)))

    def reflect(connection: socket.socket) -> None:
        connection.sendall(impostor)
        claim = connection.recv(1000)
        connection.sendall(b"+" + claim[32:64])

    assert "cannot prove it" in dial_a_stranger(reflect)


def test_a_proof_that_was_heard_serves_no_other_purpose_and_no_second_time():
    """A thief passes the leader's nonce on to a caller, and the caller's claim, changed, to the leader."""

    async def steal(change: Callable[[bytes], bytes]) -> str | None:
        key = key_of("s", "j")
        claims: list[bytes] = []

        async def play_leader(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(banner)
            claims.append(await reader.readexactly(32 + 32 + 1 + len("store 1")))
            writer.close()

        heard: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

        async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            caller = await answer(reader, writer, key, timeout_s=5)
            heard.set_result(None if caller is None else caller.purpose)
            writer.close()

        leader = await asyncio.start_server(lead, "127.0.0.1", 0)
        thief = await asyncio.start_server(play_leader, "127.0.0.1", 0)
        async with leader, thief:
            from_leader, to_leader = await asyncio.open_connection(*leader.sockets[0].getsockname())
            banner = await from_leader.readexactly(len(b"PHOTINUS-JOB/1\n") + 32)
            from_thief, to_thief = await asyncio.open_connection(*thief.sockets[0].getsockname())
            with pytest.raises(HandshakeError):
                await prove(from_thief, to_thief, key, "store 1", timeout_s=5)
            to_leader.write(change(claims[0]))
            told = await heard
            for writer in (to_leader, to_thief):
                writer.close()
        return told

    assert asyncio.run(steal(lambda claim: claim)) == "store 1"
    assert asyncio.run(steal(lambda claim: claim[:-1] + b"2")) is None  # another purpose
    assert asyncio.run(steal(lambda claim: bytes(32) + claim[32:])) is None  # another caller


def test_silence_at_the_port_is_a_leader_that_is_stopped_where_it_was_known_and_a_stranger_elsewhere(monkeypatch):
    monkeypatch.setattr(client, "_HANDSHAKE_S", 0.1)
    monkeypatch.setattr(client, "_STRANGER_S", 0.2)
    with listen("127.0.0.1", 0) as silent:
        where = silent.getsockname()
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(client.dial(*where, b"key", "host", is_known=True))
        with pytest.raises(
            LaunchError,
            match="does not answer as the host that leads this job: it accepts the connection and sends noth",
        ):
            asyncio.run(client.dial(*where, b"key", "host"))


class Marker:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return (os.mkdir, ("unpickled-by-a-stranger",))


def test_a_message_is_json_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def read(data: bytes) -> object:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await channel.read(reader)

    payload = pickle.dumps(Marker())
    with pytest.raises(channel.MessageError, match="not JSON"):
        asyncio.run(read(len(payload).to_bytes(4, "big") + payload))
    with pytest.raises(channel.MessageError, match=r"a message of \d+ bytes"):
        asyncio.run(read(b"\xff\xff\xff\xff"))
    with pytest.raises(channel.MessageError, match="not a JSON object"):
        asyncio.run(read(b"\0\0\0\x02[]"))
    assert list(tmp_path.iterdir()) == []


def test_a_report_travels_by_ages_and_comes_back_the_same():
    now = time.monotonic()
    raised = Raised((("ValueError", "x"), ("OSError", "y")), "Traceback ...", 1, now - 2.0, "train.py:3")
    deaths = (
        Death(3, 1, 44, "b", 1, now - 1.0, 9.0, raised=raised),
        Death(2, 0, 43, "b", -9, now - 0.5, 9.0, ended_by_us=True),
    )
    back = Report.from_json(Report(deaths, (5, 6), 120).to_json())
    assert (back.finished, back.steps) == ((5, 6), 120)
    assert back.deaths[0].raised is not None
    assert (back.deaths[0].raised.chain, back.deaths[0].raised.place) == (raised.chain, raised.place)
    for before, after in zip(deaths, back.deaths, strict=True):
        assert after.seen_at_s == pytest.approx(before.seen_at_s, abs=0.5)
        assert (after.rank, after.pid, after.status, after.ended_by_us) == (
            before.rank,
            before.pid,
            before.status,
            before.ended_by_us,
        )
    with pytest.raises(ValueError, match="not a report"):
        Report.from_json({"deaths": [{"rank": 1}], "finished": []})


def test_a_report_from_a_host_with_another_clock_has_the_times_of_this_one(monkeypatch):
    raised = Raised((("ValueError", "x"),), "", 1, 90.0)
    monkeypatch.setattr("photinus.job.restart_policy.time.monotonic", lambda: 100.0)
    fields = Report((Death(3, 1, 44, "b", 1, 95.0, 9.0, raised=raised),), ()).to_json()
    monkeypatch.setattr("photinus.job.restart_policy.time.monotonic", lambda: 5100.0)
    (death,) = Report.from_json(fields).deaths
    assert (death.seen_at_s, death.lived_s) == (5095.0, 9.0)
    assert death.raised is not None
    assert death.raised.raised_at_s == 5090.0


def leader_of(name: str, monkeypatch: pytest.MonkeyPatch, *, own: list[str], outside: list[str]) -> tuple[str, str]:
    """Where a host listens that leads under this name, and what it says."""
    said: list[str] = []

    def local(host: str) -> list[str]:
        if not own:
            raise OSError("no such name")
        return own

    monkeypatch.setattr(join, "local_addresses_of", local)
    monkeypatch.setattr(join, "outside_addresses", lambda: outside)
    found = join._own_addresses(name, lambda text, alarm: said.append(text))
    assert found is not None
    return found[0], "".join(said)


def test_a_host_whose_own_name_is_loopback_leads_where_others_reach_it(monkeypatch):
    address, said = leader_of("node1", monkeypatch, own=["127.0.1.1"], outside=["10.0.0.7"])
    assert address == "10.0.0.7"
    assert (
        "node1 resolves to 127.0.1.1 on this host, which other hosts cannot reach: the job listens on 10.0.0.7" in said
    )


def test_a_host_that_does_not_know_its_own_name_leads_all_the_same(monkeypatch):
    address, said = leader_of(socket.gethostname(), monkeypatch, own=[], outside=["10.0.0.7"])
    assert address == "10.0.0.7"
    assert "resolves to nothing on this host" in said


def test_a_host_of_several_networks_whose_name_is_loopback_leads_on_all_and_says_so(monkeypatch):
    address, said = leader_of("node1", monkeypatch, own=["127.0.1.1"], outside=["10.0.0.7", "10.1.0.7"])
    assert address == "0.0.0.0"
    assert "the job listens on all addresses (10.0.0.7, 10.1.0.7) (to change it: --local-addr)" in said


@pytest.mark.parametrize(
    ("name", "own", "outside"),
    [
        ("localhost", ["127.0.0.1"], ["10.0.0.7"]),
        ("127.0.0.1", ["127.0.0.1"], ["10.0.0.7"]),
        ("node1", ["127.0.1.1"], []),
        ("node1", ["10.0.0.5"], ["10.0.0.7"]),
    ],
)
def test_other_names_are_taken_at_their_word(monkeypatch, name, own, outside):
    assert leader_of(name, monkeypatch, own=own, outside=outside) == (own[0], "")


def job(hosts: HostSpec, workers: int = 1) -> Job:
    return Job(JobSpec(Program("script", "x.py"), max_restarts=0, stop_grace_s=1.0, hosts=hosts), "job", workers, {})


def test_a_leaders_name_that_does_not_resolve_is_waited_for_with_a_line_and_a_limit(monkeypatch):
    monkeypatch.setattr("photinus.job.client._SAY_AFTER_S", 0.2)
    said: list[str] = []
    flags = HostSpec((2, 2), node_rank=0, leader="nosuch.invalid", join_timeout_s=0.5)
    with join.join_job(job(flags), store=StoreProcess(), say=lambda text, _: said.append(text)) as member:
        with pytest.raises(
            LaunchError,
            match=r"could not reach the host that leads the job within 0.5 s: nosuch.invalid port 29500: \S+",
        ):
            member.meet(lambda: None)
    assert said[0].startswith("photinus: waiting for the host that leads the job, at nosuch.invalid port 29500 (")


@pytest.mark.parametrize("node_rank", [None, 0, 1])
def test_port_0_is_refused_on_each_of_several_hosts(node_rank):
    flags = HostSpec((2, 2), node_rank=node_rank, leader="192.0.2.1", port=0)
    with pytest.raises(UsageError, match="--master-port 0 works on one host only"):
        with join.join_job(job(flags), store=StoreProcess(), say=lambda *_: None):
            pass


def test_a_host_whose_name_resolves_one_look_up_later_leads(monkeypatch):
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    looks = iter([socket.gaierror(-2, "Name or service not known")] * 2)

    def late(host: str) -> list[str]:
        if error := next(looks, None):
            raise error
        return ["127.0.0.1"]

    monkeypatch.setattr(join, "local_addresses_of", late)
    flags = HostSpec((1, 2), leader="late.invalid", port=port, last_call_s=0.0, join_timeout_s=20.0)
    with (
        contextlib.closing(StoreProcess()) as store,
        join.join_job(job(flags, 3), store=store, say=lambda *_: None) as member,
    ):
        assert not member.leads
        members = member.meet(lambda: None)
        assert (member.leads, members.workers, members.host_rank) == (True, (3,), 0)


def test_a_name_that_resolves_late_to_another_leader_of_this_host_is_dialled_there(monkeypatch):
    for limit in ("_HANDSHAKE_S", "_STRANGER_S"):
        monkeypatch.setattr(f"photinus.job.client.{limit}", 0.1)
    looks = iter([socket.gaierror(-2, "Name or service not known")] * 2)

    def late(host: str) -> list[str]:
        if error := next(looks, None):
            raise error
        return ["127.0.0.1"]

    monkeypatch.setattr(join, "outside_addresses", list)
    monkeypatch.setattr(join, "local_addresses_of", late)
    with listen("127.0.0.1", 0) as taken:
        flags = HostSpec((2, 2), leader="late.invalid", port=taken.getsockname()[1], join_timeout_s=2.0)
        with join.join_job(job(flags), store=StoreProcess(), say=lambda *_: None) as member:
            with pytest.raises(LaunchError, match=r"127\.0\.0\.1 port \d+ does not answer as the host that leads"):
                member.meet(lambda: None)
