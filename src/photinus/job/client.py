"""A host's end of a job on several hosts: dials the leader, proves itself, and speaks for this host's agent.

The connection lives in a thread; the agent's thread reads what came from a queue. Either side sends a sign of life
every second, so a host that is cut off is noticed on both sides, by the clock of each alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

from ..errors import LaunchError
from ..version import __version__
from . import channel
from .attempt import AttemptMembers, AttemptStore, JobEndedError, Order
from .own_address import interface_of
from .relay import Relay
from .restart_policy import Report, Verdict
from .spec import HostSpec

_SAY_AFTER_S = 3.0
_GOODBYE_S = 2.0
_CHECK_S = 0.1
_CONNECT_S = 5.0
_HANDSHAKE_S = 3.0
_STRANGER_S = 1.5  # so long may the leader of the last job on this port take to go away
_PAUSE_S = 0.2
_GATHER_AGAIN = ("regroup", "save")


class SeveralHosts:
    """The `Peers` of a job with several hosts. Serve it in a thread (`serve_in_thread`); close `fd` afterwards.

    Args:
        hosts: the job's hosts, as typed.
        workers: number of workers of this host.
        key: of the proofs; see `channel`.
        lead: leads the job if this is the host to do so; returns whether it is, and where the leader is.
        comes_back: whether to join again when the leader was lost.
        say: prints for people.
        store: of this host; used if this host leads.
        is_shown_elsewhere: the leader's terminal is this one.

    Attributes:
        leads: whether the leader is on this host.
        fd: readable when something came from the leader.
    """

    def __init__(
        self,
        hosts: HostSpec,
        workers: int,
        key: bytes,
        *,
        lead: Callable[[], tuple[bool, str, int]],
        comes_back: bool,
        say: Callable[[str, bool], None],
        store: AttemptStore,
        is_shown_elsewhere: bool = False,
    ) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.leads, self._address, self._port = lead()
        self._hosts, self._key, self._lead, self._comes_back = hosts, key, lead, comes_back
        self._say, self._store, self._is_shown_elsewhere = say, store, is_shown_elsewhere
        versions = {"version": __version__, "torch": metadata.version("torch")}
        names = {"host": socket.gethostname(), "launcher": secrets.token_hex(8)}
        place = {"workers": workers, "node_rank": hosts.node_rank, "nnodes": hosts.nnodes}
        self._hello = {"type": "hello", **versions, **names, **place}
        self._came: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()  # from the loop to the agent
        self._over: JobEndedError | None = None
        # In the loop:
        self._writer: asyncio.StreamWriter | None = None  # None: not connected
        self._unsent: list[Mapping[str, Any]] = []  # until then
        self._relay: Relay | None = None

    def meet(self, check: Callable[[], None]) -> AttemptMembers:
        """Say that this host is ready, and wait for the next attempt."""
        self._send({"type": "ready"})
        while True:
            message = self._next(check)
            if message["type"] == "form":
                return self._start(message)
            if message["type"] in _GATHER_AGAIN:  # the leader was lost, and did not hear that this host is ready
                self._send({"type": "ready"})

    def order(self) -> Order | None:
        """Return the leader's next order. JobEndedError: the job is over."""
        if loss := self._store.loss():
            self._send({"type": "store lost", "reason": loss})
        while (message := self._take()) is not None:
            if message["type"] in ("stop", *_GATHER_AGAIN):
                order: Order = message["type"]
                return order
        if self._over is not None and self._over.exit_code != 0:
            raise self._over
        return None if self._over is None else "done"

    def report_ended(self, ranks: Sequence[int]) -> None:
        """Send the ranks to the leader: the workers of all hosts read them in the store on its host."""
        self._send({"type": "ended", "ranks": list(ranks)})

    def report_finished(self) -> None:
        """Say that all workers of this host ended well; "done" will follow, or another order."""
        self._send({"type": "finished"})

    def verdict_on(self, report: Report, check: Callable[[], None]) -> Verdict | None:
        """Send how this host's workers ended, and wait for the verdict on those of all hosts.

        Returns None when another host failed, and all gather again.
        """
        self._send({"type": "report", "report": report.to_json()})
        while True:
            message = self._next(check)
            if message["type"] == "verdict":
                verdict = Verdict(**{name: value for name, value in message.items() if name != "type"})
                if not self.leads and not self._is_shown_elsewhere:  # the leader has said all of it, elsewhere
                    self._say(verdict.short, not verdict.suspended)
                return verdict
            if message["type"] in _GATHER_AGAIN:
                return None

    def leave(self, reason: str, exit_code: int) -> None:
        """Say that this host goes; the job ends with the exit code if this is the leader's."""
        self._comes_back = False
        self._send({"type": "leave", "reason": reason, "exit_code": exit_code})

    async def open(self) -> None:
        """Begin to dial the leader."""
        self._loop = asyncio.get_running_loop()
        self._connected = asyncio.ensure_future(self._stay_connected())

    async def close(self) -> None:
        """Send what is still to be said, and close all that is open."""
        if self._relay is not None:
            await self._relay.close()
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                await asyncio.wait_for(self._writer.wait_closed(), _GOODBYE_S)
        self._connected.cancel()

    def _start(self, message: Mapping[str, Any]) -> AttemptMembers:
        port = message.get("relay_port")
        if port is None:
            port = self._store.open()
            self._send({"type": "store", "port": port})
        return AttemptMembers(
            workers=tuple(message["workers"]),
            host_rank=int(message["host_rank"]),
            attempt=int(message["attempt"]),
            job_id=str(message["job_id"]),
            store_port=port,
            restarts=int(message["restarts"]),
            interface=interface_of(str(message["reached_at"])),
        )

    def _take(self) -> Mapping[str, Any] | None:
        """Return the next message that the agent has to act upon, if one has come; the others are carried out."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        while not self._came.empty():
            message = self._came.get_nowait()
            kind = message["type"]
            if kind == "ended":
                self._store.tell_ended(map(int, message["ranks"]))
            elif kind == "end":
                reason = f"the job ended: {message['reason'] or 'with success, before this host joined'}"
                self._over = JobEndedError(reason, exit_code=int(message["exit_code"]))
            else:
                return message
        return None

    def _next(self, check: Callable[[], None]) -> Mapping[str, Any]:
        """Wait for the next message that the agent has to act upon."""
        while True:
            check()
            message = self._take()
            if message is not None:
                return message
            if self._over is not None:
                raise self._over
            select.select([self.fd], [], [], _CHECK_S)

    def _send(self, message: Mapping[str, Any]) -> None:
        self._loop.call_soon_threadsafe(self._write, message)

    # What follows runs in the loop.

    def _write(self, message: Mapping[str, Any]) -> None:
        if self._writer is None:
            self._unsent.append(message)
        else:
            channel.write(self._writer, message)

    def _hand_over(self, message: Mapping[str, Any]) -> None:
        """Give a message to the agent."""
        self._came.put(message)
        os.eventfd_write(self.fd, 1)

    async def _stay_connected(self) -> None:
        """Hold a connection, and another when it is lost, from the first attempt to dial until the job ends."""
        try:
            connection = await self._dial()
            while (loss := await self._talk(*connection)) is not None:
                connection = await self._come_back(*loss)
        except LaunchError as error:
            self._hand_over({"type": "end", "reason": str(error), "exit_code": error.exit_code})

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, bool] | None:
        """Talk until the job ends, or the leader is lost; return why it was lost, and whether by silence."""
        grace_s, own_address = self._hosts.heartbeat_timeout_s, str(writer.get_extra_info("sockname")[0])
        channel.retry_soon(writer, grace_s)
        channel.write(writer, {**self._hello, "leads": self.leads})
        for message in self._unsent:
            channel.write(writer, message)
        self._unsent.clear()
        self._writer = writer
        beating = asyncio.ensure_future(_beat(writer))
        try:
            while True:
                message = await channel.hear(reader, "the host that leads the job", grace_s, self._say_line)
                kind = message.get("type")
                if kind == "form":
                    message["reached_at"] = message.get("reached_at") or own_address
                    if not message["hosts_store"]:
                        message["relay_port"] = await self._open_relay(str(message["token"]))
                if kind != "beat":
                    self._hand_over(message)
                if kind == "end":
                    return None
        except asyncio.TimeoutError:
            return f"no sign of life for {grace_s:g} s", True
        except asyncio.IncompleteReadError:
            return "its launcher closed the connection", False
        except (OSError, channel.MessageError) as error:
            return str(error), False
        finally:
            beating.cancel()
            self._writer = None
            writer.close()

    async def _come_back(self, why: str, silent: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Dial a leader that was lost again.

        Raises:
            LaunchError: it closed the connection because it has ended, or does not come back.
        """
        reason = f"the host that leads the job ({self._address} port {self._port}) was lost: {why}"
        if self.leads or not self._comes_back:
            raise LaunchError(reason)
        if silent:
            self._forget(reason)
            return await self._dial(again=True)
        try:  # it may have lost us first
            connection = await dial(self._address, self._port, self._key, "host")
        except (OSError, asyncio.TimeoutError, LaunchError):
            raise LaunchError(reason) from None
        self._forget(reason)
        return connection

    def _forget(self, reason: str) -> None:
        """Drop what was to be said to the leader that was lost, and have this host's agent gather again."""
        self._unsent.clear()
        self._say_line(f"{reason}; this host stops its workers and joins again")
        self._hand_over({"type": "regroup"})

    async def _dial(self, *, again: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a proved connection to the leader, which may still have to be started.

        `again`: the leader was there before.

        Raises:
            LaunchError: it was not there in time, or something else is.
        """
        begun_s = time.monotonic()
        limit_s, has_said, pause_s = self._hosts.join_timeout_s, False, 0.1
        while True:
            dialled_s = time.monotonic()
            where = f"{self._address} port {self._port}"
            try:
                return await dial(self._address, self._port, self._key, "host", is_known=again)
            except asyncio.TimeoutError:
                why = "no answer"
            except OSError as error:  # refused, unreachable, or a name that does not resolve (yet)
                why = (os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)).lower()
                if again and isinstance(error, ConnectionRefusedError):
                    raise LaunchError(f"the host at {where} no longer leads the job: {why}") from None
            if not (again or self.leads):  # the name may mean this host by now
                found = await asyncio.get_running_loop().run_in_executor(None, self._lead)
                self.leads, self._address, self._port = found
                if self.leads:
                    continue
            waited_s = time.monotonic() - begun_s
            if waited_s > limit_s:
                raise LaunchError(
                    f"could not reach the host that leads the job within {limit_s:g} s: {where}: {why}."
                    + " Is the command running there, with the same --master-addr and --master-port?" * (not again)
                )
            if waited_s > _SAY_AFTER_S and not has_said:
                has_said = True
                self._say(f"photinus: waiting for the host that leads the job, at {where} ({why})\n", False)
            await asyncio.sleep(max(0.0, pause_s - (time.monotonic() - dialled_s)))
            pause_s = min(1.0, pause_s * 1.5)

    async def _open_relay(self, token: str) -> int:
        if self._relay is not None:
            await self._relay.close()
        self._relay = Relay(self._address, self._port, self._key, token)
        try:
            return await self._relay.open()
        except OSError as error:
            raise LaunchError(f"cannot listen on 127.0.0.1 for this host's workers: {error}") from error

    def _say_line(self, text: str) -> None:
        if not self.leads:  # there the leader does
            self._say(f"photinus: {text}\n", False)


async def _beat(writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(channel.BEAT_S)
        channel.write(writer, {"type": "beat"})


async def dial(
    address: str, port: int, key: bytes, purpose: str, *, is_known: bool = False
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection to the leader, proved on both sides; `is_known`: it has proved itself there before.

    Raises:
        LaunchError: something else is behind that port; says what it does.
        OSError, asyncio.TimeoutError: nobody is there (yet), or the known leader is silent (stopped, or its host is).
    """
    begun_s = time.monotonic()
    while True:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port), _CONNECT_S)
        try:
            await channel.prove(reader, writer, key, purpose, timeout_s=_HANDSHAKE_S)
            return reader, writer
        except channel.HandshakeError as error:
            writer.close()
            if is_known and isinstance(error.__cause__, asyncio.TimeoutError):
                raise error.__cause__ from None
            if time.monotonic() - begun_s > _STRANGER_S:
                raise LaunchError(_stranger(address, port, error)) from None
        await asyncio.sleep(_PAUSE_S)


def _stranger(address: str, port: int, error: channel.HandshakeError) -> str:
    advice = (
        "Give all hosts the same --rdzv-id, and the same PHOTINUS_JOB_SECRET if you set it; or give this job another "
        "--master-port."
        if isinstance(error, channel.RefusedError)
        else f"Give all hosts another --master-port (`ss -ltnp 'sport = :{port}'` there shows the process)."
    )
    return f"{address} port {port} does not answer as the host that leads this job: {error}. {advice}"
