"""The leading host's end of a job on several hosts: one port, behind which the hosts meet and the store is found.

Carries out what `membership` decides, in a thread of the leading launcher, so that hosts are answered whatever that
waits for. The leader's own workers take part through a `Member` like those of every other host; that one also hosts the
store.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from ..version import __version__
from . import channel, membership
from .channel import Caller, answer
from .relay import splice
from .restart_policy import Report, RestartPolicy

_TICK_S = 0.1
_HANDSHAKE_S = 5.0
_GOODBYE_S = 2.0
_ENDS_S = 5.0
_SILENT_S = 2.5 * channel.BEAT_S


class Leader:
    """Leads until `close`. All its methods run in one asyncio loop."""

    def __init__(
        self,
        key: bytes,
        listener: socket.socket,
        rules: membership.Membership,
        policy: RestartPolicy,
        *,
        job_id: str,
        say: Callable[[str, bool], None],
    ) -> None:
        self._key, self._listener = key, listener
        self._rules, self._policy = rules, policy
        self._job_id = job_id
        self._say = say
        self._keys = itertools.count()
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._own: int | None = None  # key of the leader's own host
        self._heard_s: dict[int, float] = {}  # when each host was heard last
        self._launchers: dict[str, int] = {}  # keys by the name that each launcher gave itself
        self._torch: str | None = None
        self._token = ""
        self._store_port: int | None = None
        self._waiting_forms: list[tuple[int, dict[str, Any]]] = []  # until the store is there
        self._carried: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Begins to serve on the listening socket."""
        self._server = await asyncio.start_server(self._serve, sock=self._listener)
        self._ticking = asyncio.ensure_future(self._tick())

    async def close(self) -> None:
        """Lets the last words reach the others, and closes the port."""
        deadline = time.monotonic() + _GOODBYE_S
        while self._own in self._writers and time.monotonic() < deadline:  # why the own host leaves may be on its way
            await asyncio.sleep(0.01)
        self._carry_out(self._rules.end("the host that leads ended before it started workers", 1))
        self._ticking.cancel()
        self._server.close()
        deadline = time.monotonic() + _GOODBYE_S
        while self._writers and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for writer in self._writers.values():
            writer.close()

    async def _tick(self) -> None:
        beat_s, now_s = 0.0, time.monotonic()
        while True:
            before_s, now_s = now_s, time.monotonic()
            if now_s - before_s > channel.SAY_AFTER_S:
                self._say_line(f"the launcher that leads the job did not run for {now_s - before_s:.0f} s (stopped?)")
            self._carry_out(self._rules.tick(now_s))
            if now_s - beat_s >= channel.BEAT_S:
                beat_s = now_s
                for writer in self._writers.values():
                    channel.write(writer, {"type": "beat"})
            await asyncio.sleep(_TICK_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            caller = await answer(reader, writer, self._key, timeout_s=_HANDSHAKE_S)
            if caller is None:
                return
            kind, _, token = caller.purpose.partition(" ")
            if kind == "store":
                await self._serve_store(caller, reader, writer, token)
            elif kind == "host":
                caller.accept()
                channel.retry_soon(writer, self._rules.heartbeat_timeout_s)
                await self._host(reader, writer)
            else:
                await caller.refuse(f"unknown request {kind!r}")
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, channel.MessageError):
            pass  # went away, or is told off by the closed connection; a host's end is told in _host
        except asyncio.CancelledError:
            pass  # by `close` or a new attempt; Python 3.10 and 3.11 would print a traceback for a server's task
        finally:
            writer.close()

    async def _serve_store(
        self, caller: Caller, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str
    ) -> None:
        if self._store_port is None or not secrets.compare_digest(token, self._token):
            await caller.refuse("that attempt is over")
            return
        caller.accept()
        task = asyncio.current_task()
        assert task is not None
        self._carried.add(task)
        try:
            await splice((reader, writer), await asyncio.open_connection("127.0.0.1", self._store_port))
        finally:
            self._carried.discard(task)

    async def _host(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await asyncio.wait_for(channel.read(reader), self._rules.heartbeat_timeout_s)
        key = next(self._keys)
        before = self._launchers.get(str(hello["launcher"]))
        self._launchers[str(hello["launcher"])] = key
        if before is not None and before in self._writers:  # lost to that host, and not yet to us
            self._writers.pop(before).close()
            why = "was lost, and joins again"
            self._carry_out(self._rules.remove_host(before, why, time.monotonic(), lost=True))
        try:
            peer = await self._admit(self._peer(key, hello, writer), writer)
        except membership.RefusedHostError as error:
            channel.write(writer, {"type": "end", "reason": f"this host cannot join: {error}", "exit_code": 2})
            with contextlib.suppress(OSError, asyncio.TimeoutError):  # it reads that and closes; or it does not
                await asyncio.wait_for(reader.read(), _GOODBYE_S)
            return
        self._writers[key] = writer
        if peer.leads:
            self._own = key
        grace_s = self._rules.heartbeat_timeout_s
        why, is_lost = "was lost: its launcher closed the connection", True
        try:
            while True:
                message = await channel.hear(reader, f"host {peer.name}", grace_s, self._say_line)
                self._heard_s[key] = time.monotonic()
                if message["type"] == "leave":
                    why, is_lost = str(message["reason"]), False
                    if peer.leads:
                        self._carry_out(self._rules.end(f"host {peer.name} {why}", int(message["exit_code"])))
                    return
                self._handle(key, message)
        except asyncio.TimeoutError:
            why = f"was lost: no sign of life for {grace_s:g} s"
        except OSError as error:
            why = f"was lost: {error.strerror or error}"
        except (channel.MessageError, KeyError, TypeError, ValueError) as error:
            why, is_lost = f"sent an invalid message: {error}", False
        except asyncio.IncompleteReadError:
            pass
        finally:
            self._writers.pop(key, None)
            self._heard_s.pop(key, None)
            if peer.leads:  # it has the store
                self._carry_out(self._rules.end(f"host {peer.name}, which leads, {why}", 1))
            self._carry_out(self._rules.remove_host(key, why, time.monotonic(), lost=is_lost))

    async def _admit(self, peer: membership.PeerHost, writer: asyncio.StreamWriter) -> membership.PeerHost:
        """Takes a host in. Without a place it waits while another host is silent: that may be this one, started again.

        Raises:
            RefusedHostError: it may not take part.
        """
        has_said = False
        while True:
            now_s = time.monotonic()
            try:
                self._rules.add(peer, now_s)
                self._heard_s[peer.key] = now_s
                return peer
            except membership.RefusedHostError:
                silent_s = now_s - min(self._heard_s.values(), default=now_s)
                if self._rules.state == "ended" or silent_s < _SILENT_S or writer.is_closing():
                    raise
            if not has_said:
                has_said = True
                self._say_line(f"host {peer.name} waits until a silent host gives up its place")
            channel.write(writer, {"type": "beat"})
            await asyncio.sleep(_TICK_S)

    def _peer(self, key: int, hello: dict[str, Any], writer: asyncio.StreamWriter) -> membership.PeerHost:
        version, hosts, torch = str(hello["version"]), tuple(hello["nnodes"]), str(hello["torch"])
        host = str(hello["host"])
        if version != __version__:
            raise membership.RefusedHostError(
                f"{host} has photinus {version}, the host that leads has {__version__}; install the same on all hosts"
            )
        limits = (self._rules.least, self._rules.most)
        if hosts != limits:
            raise membership.RefusedHostError(
                f"{host} was started with --nnodes {_nnodes_text(hosts)}, the host that leads with "
                f"{_nnodes_text(limits)}"
            )
        if self._torch is None:
            self._torch = torch
        elif self._torch != torch:
            self._say_line(
                f"host {host} has torch {torch}, but another host has {self._torch}: results may differ, or ranks fail"
            )
        return membership.PeerHost(
            key=key,
            host=host,
            address=str(writer.get_extra_info("peername")[0]),
            workers=int(hello["workers"]),
            node_rank=None if hello["node_rank"] is None else int(hello["node_rank"]),
            leads=bool(hello["leads"]),
        )

    def _handle(self, key: int, message: dict[str, Any]) -> None:
        now_s, kind = time.monotonic(), message["type"]
        if kind == "ready":
            self._carry_out(self._rules.ready(key, now_s))
        elif kind == "finished":
            self._carry_out(self._rules.finish(key, now_s))
        elif kind == "report":
            self._carry_out(self._rules.fail(key, Report.from_json(message["report"]), now_s))
        elif kind == "store" and key == self._own:
            self._store_port = int(message["port"])
            for other, form in self._waiting_forms:
                self._send((other,), form)
            self._waiting_forms.clear()
        elif kind == "store lost" and key == self._own:
            self._carry_out(self._rules.lose_store(str(message["reason"]), now_s))
        elif kind == "ended":
            self._rules.note_ended_rank()
            if self._own is not None:  # the store is there
                self._send((self._own,), message)
        elif kind != "beat":
            raise channel.MessageError(f"unknown type {kind!r}")

    def _carry_out(self, acts: Sequence[membership.Act]) -> None:
        for act in acts:
            if isinstance(act, membership.Say):
                self._say_line(act.text)
            elif isinstance(act, membership.StartAttempt):
                self._start_attempt(act)
            elif isinstance(act, membership.Stop):
                self._send(act.keys, {"type": "stop"})
            elif isinstance(act, membership.Regroup):
                self._say_line(f"{act.reason}: the present hosts stop their workers and form a new group")
                self._send(act.keys, {"type": "save" if act.unharmed else "regroup"})
            elif isinstance(act, membership.Drop):
                self._writers[act.key].close()
            elif isinstance(act, membership.Decide):
                self._decide(act)
            elif isinstance(act, membership.End):
                self._send(tuple(self._writers), {"type": "end", **act._asdict()})

    def _start_attempt(self, act: membership.StartAttempt) -> None:
        for task in self._carried:
            task.cancel()
        self._store_port = None
        self._waiting_forms.clear()
        self._token = secrets.token_hex(8)
        workers = [peer.workers for peer in act.peers]
        first, shares = 0, []
        for peer in act.peers:
            last = first + peer.workers - 1
            shares.append(f"{peer.name} {f'rank {first}' if first == last else f'ranks {first} to {last}'}")
            first = last + 1
        count = f"{len(workers)} host{'s' * (len(workers) > 1)}, {sum(workers)} worker{'s' * (sum(workers) > 1)}"
        self._say_line(f"{count}: {', '.join(shares)}")
        for host_rank, peer in enumerate(act.peers):
            form = {
                "type": "form",
                "workers": workers,
                "host_rank": host_rank,
                "attempt": act.attempt,
                "restarts": self._policy.restarts,
                "job_id": self._job_id,
                "token": self._token,
                "hosts_store": peer.leads,
            }
            if peer.leads:
                # Its own connection does not say on which interface the others reach it; theirs do.
                others = [writer for key, writer in self._writers.items() if key != peer.key]
                form["reached_at"] = others[0].get_extra_info("sockname")[0] if others else None
                self._send((peer.key,), form)
            else:
                self._waiting_forms.append((peer.key, form))

    def _decide(self, act: membership.Decide) -> None:
        verdict = self._policy.decide(act.reports, world_size=act.world_size, attempt=act.attempt)
        self._say(verdict.text, not verdict.suspended)
        self._send(act.keys, {"type": "verdict", **verdict._asdict()})
        self._rules.go_on(verdict.restart, time.monotonic())

    def _send(self, keys: Sequence[int], message: dict[str, Any]) -> None:
        for key in keys:
            if key in self._writers:
                channel.write(self._writers[key], message)

    def _say_line(self, text: str) -> None:
        self._say(f"photinus: {text}\n", False)


def _nnodes_text(hosts: Sequence[int]) -> str:
    return ":".join(map(str, sorted(set(hosts))))


class Served(Protocol):
    """A part of the launcher with an asyncio loop of its own."""

    async def open(self) -> None:
        """Begin; raises what keeps it from that."""

    async def close(self) -> None:
        """End what is under way."""


@contextlib.contextmanager
def serve_in_thread(server: Served) -> Iterator[None]:
    """Run `server` in a thread for the duration of the block: it goes on whatever the block waits for."""
    began: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        over = asyncio.Event()
        await server.open()
        began.set_result((asyncio.get_running_loop(), over))
        await over.wait()
        await server.close()

    def run() -> None:
        try:
            asyncio.run(serve())
        except Exception as error:
            if began.done():
                raise
            began.set_exception(error)  # as with too few descriptors: nobody would answer

    thread = threading.Thread(target=run, name="photinus-server", daemon=True)
    thread.start()
    loop, over = began.result()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(_ENDS_S)
