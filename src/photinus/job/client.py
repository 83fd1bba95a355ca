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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import Any

from ..errors import LaunchError
from ..version import __version__
from . import channel
from .attempt import AttemptStore, Formation, JobEndedError, Order
from .channel import dial
from .own_address import interface_of
from .relay import Relay
from .restart_policy import Report, Verdict

_SAY_AFTER_S = 3.0
_GOODBYE_S, _ENDS_S = 2.0, 5.0
_CHECK_S = 0.1
_RELAY_S = 30.0
_MEET_ANEW = ("regroup", "save")


class Member:
    """The other hosts of the job, for this host's agent. Begins to dial with `introduce`.

    Attributes:
        leads: whether the leader is on this host.
        fd: readable when something came from the leader.
    """

    def __init__(
        self,
        address: str,
        port: int,
        key: bytes,
        *,
        leads: bool,
        lead: Callable[[], tuple[bool, str, int]],
        join_timeout_s: float,
        heartbeat_timeout_s: float,
        comes_back: bool,
        say: Callable[[str, bool], None],
        store: AttemptStore,
        is_shown_elsewhere: bool = False,
    ) -> None:
        self._address = address
        self._port = port
        self._key = key
        self._join_timeout_s = join_timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._comes_back = comes_back
        self._say = say
        self.leads = leads
        self._lead = lead
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._came: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._outgoing: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self._relay: Relay | None = None
        self._hello: Mapping[str, Any] = {}
        self._speaking: asyncio.Future[None] | None = None
        self._own_address = ""
        self._over: JobEndedError | None = None
        self._store = store
        self._is_shown_elsewhere = is_shown_elsewhere
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._leaving: asyncio.Event

    def introduce(self, workers: int, node_rank: int | None, nnodes: tuple[int, int]) -> None:
        """Dials the leader and says who this host is; before the first `meet`."""
        versions = {"version": __version__, "torch": metadata.version("torch")}
        names = {"host": socket.gethostname(), "launcher": secrets.token_hex(8)}
        place = {"workers": workers, "node_rank": node_rank, "nnodes": nnodes, "leads": self.leads}
        self._hello = {"type": "hello", **versions, **names, **place}
        began = threading.Event()
        target, name = partial(asyncio.run, self._live(began)), "photinus-member"
        self._thread = threading.Thread(target=target, name=name, daemon=True)
        self._thread.start()
        began.wait()

    def meet(self, check: Callable[[], None]) -> Formation:
        """Says that this host is ready and waits for the next attempt; calls `check` often, which may raise.

        Raises:
            JobEndedError: there is none.
        """
        self._send({"type": "ready"})
        while True:
            message = self._next(check)
            if message["type"] == "form":
                return self._formation(message)
            if message["type"] in _MEET_ANEW:  # the leader was lost, and did not hear that this host is ready
                self._send({"type": "ready"})

    def order(self) -> Order | None:
        """The leader's next order, None when none has come. JobEndedError: the job is over."""
        if loss := self._store.loss():
            self._send({"type": "store lost", "reason": loss})
        while (message := self._take()) is not None:
            if message["type"] in ("stop", *_MEET_ANEW):
                order: Order = message["type"]
                return order
        if self._over is not None and self._over.exit_code != 0:
            raise self._over
        return None if self._over is None else "done"

    def report_ended(self, ranks: Sequence[int]) -> None:
        """Says that these of this host's workers ended well while others run: they may be waited for in vain.

        The workers of all hosts read it in the store that the leader's host holds.
        """
        self._send({"type": "ended", "ranks": list(ranks)})

    def report_finished(self) -> None:
        """Says that all workers of this host ended well; "done" will follow, or another order."""
        self._send({"type": "finished"})

    def verdict_on(self, report: Report, check: Callable[[], None]) -> Verdict | Order:
        """Tells how this host's workers ended in a failed attempt, and waits for the verdict on those of all hosts.

        Returns the order "regroup" in place of a verdict when what failed was another host.
        """
        self._send({"type": "report", "report": channel.report_to_json(report)})
        while True:
            message = self._next(check)
            if message["type"] == "verdict":
                verdict = Verdict(**{name: value for name, value in message.items() if name != "type"})
                if not self.leads and not self._is_shown_elsewhere:  # the leader has said all of it, elsewhere
                    self._say(verdict.short, not verdict.suspended)
                return verdict
            if message["type"] in _MEET_ANEW:
                return "regroup"

    def leave(self, reason: str, exit_code: int) -> None:
        """Tells the leader that this host goes, and with which exit code the job ends if this is the leader's."""
        self._comes_back = False
        self._send({"type": "leave", "reason": reason, "exit_code": exit_code})

    def close(self) -> None:
        """Sends what is still to be said, and closes all that is open."""
        self._store.close()
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._leaving.set)
            self._thread.join(_GOODBYE_S + _ENDS_S)
        os.close(self.fd)

    async def _live(self, began: threading.Event) -> None:
        """Run in the thread until `close`, which cancels what is under way."""
        self._loop, self._leaving = asyncio.get_running_loop(), asyncio.Event()
        began.set()
        connected = asyncio.ensure_future(self._stay_connected())
        await self._leaving.wait()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._say_goodbye(), _GOODBYE_S)
        connected.cancel()

    def _formation(self, message: Mapping[str, Any]) -> Formation:
        if message["hosts_store"]:
            port = self._store.open()
            self._send({"type": "store", "port": port})
        else:
            opening = self._open_relay(str(message["token"]))
            port = asyncio.run_coroutine_threadsafe(opening, self._loop).result(_RELAY_S)
        return Formation(
            workers=tuple(message["workers"]),
            host_rank=int(message["host_rank"]),
            attempt=int(message["attempt"]),
            job_id=str(message["job_id"]),
            store_port=port,
            restarts=int(message["restarts"]),
            interface=interface_of(str(message.get("reached_at") or self._own_address)),
        )

    def _take(self) -> Mapping[str, Any] | None:
        """The next message that the agent has to act upon, None when none has come; the others are carried out."""
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
        """Waits for the next message that the agent has to act upon."""
        while True:
            check()
            message = self._take()
            if message is not None:
                return message
            if self._over is not None:
                raise self._over
            select.select([self.fd], [], [], _CHECK_S)

    def _send(self, message: Mapping[str, Any]) -> None:
        self._loop.call_soon_threadsafe(self._outgoing.put_nowait, message)

    async def _stay_connected(self) -> None:
        """The connection, and others after it when it is lost, from the first attempt to dial until the job ends."""
        try:
            connection = await self._dial()
            while (loss := await self._talk(*connection)) is not None:
                connection = await self._come_back(*loss)
        except LaunchError as error:
            self._enqueue({"type": "end", "reason": str(error), "exit_code": error.exit_code})

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, bool] | None:
        """Until the job ends, or the leader is lost: why, and whether that was by silence."""
        self._own_address = str(writer.get_extra_info("sockname")[0])
        channel.write(writer, self._hello)
        self._speaking = asyncio.ensure_future(self._speak(writer))
        grace_s = self._heartbeat_timeout_s
        channel.retry_soon(writer, grace_s)
        try:
            while True:
                message = await channel.hear(reader, "the host that leads the job", grace_s, self._tell)
                if message.get("type") != "beat":
                    self._enqueue(message)
                if message.get("type") == "end":
                    return None
        except asyncio.TimeoutError:
            return f"no sign of life for {grace_s:g} s", True
        except asyncio.IncompleteReadError:
            return "its launcher closed the connection", False
        except (OSError, channel.MessageError) as error:
            return str(error), False
        finally:
            self._speaking.cancel()
            writer.close()

    async def _come_back(self, why: str, silent: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Another connection to a leader that was lost: its workers have met without ours by then, or wait for them.

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
        """Drops what was to be said to a leader that is no longer there, and has this host's agent meet anew."""
        while not self._outgoing.empty():
            self._outgoing.get_nowait()
        self._tell(f"{reason}; this host stops its workers and joins again")
        self._enqueue({"type": "regroup"})

    async def _speak(self, writer: asyncio.StreamWriter) -> None:
        """Sends what is to be sent, and a sign of life when there is nothing."""
        with contextlib.suppress(OSError):  # `_talk` reads of it
            while True:
                try:
                    message = await asyncio.wait_for(self._outgoing.get(), channel.BEAT_S)
                except asyncio.TimeoutError:
                    message = {"type": "beat"}
                channel.write(writer, message)
                await writer.drain()
                if message["type"] == "leave":
                    return

    async def _dial(self, *, again: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A proved connection to the leader, which may still have to be started (`again`: which was there before).

        Raises:
            LaunchError: it was not there in time, or something else is.
        """
        begun_s = time.monotonic()
        where, has_said, pause_s = f"{self._address} port {self._port}", False, 0.1
        while True:
            dialled_s = time.monotonic()
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
                    self._hello = {**self._hello, "leads": True}
                    continue
            waited_s = time.monotonic() - begun_s
            if waited_s > self._join_timeout_s:
                raise LaunchError(
                    f"could not reach the host that leads the job within {self._join_timeout_s:g} s: {where}: {why}."
                    + " Is the command running there, with the same --master-addr and --master-port?" * (not again)
                )
            if waited_s > _SAY_AFTER_S and not has_said:
                has_said = True
                self._say(f"photinus: waiting for the host that leads the job, at {where} ({why})\n", False)
            await asyncio.sleep(max(0.0, pause_s - (time.monotonic() - dialled_s)))
            pause_s = min(1.0, pause_s * 1.5)

    async def _say_goodbye(self) -> None:
        if self._relay is not None:
            await self._relay.close()
        if self._speaking is not None:
            while not self._outgoing.empty() and not self._speaking.done():
                await asyncio.sleep(0.01)
            self._speaking.cancel()

    async def _open_relay(self, token: str) -> int:
        if self._relay is not None:
            await self._relay.close()
        self._relay = Relay(self._address, self._port, self._key, token)
        return await self._relay.open()

    def _tell(self, text: str) -> None:
        if not self.leads:  # there the leader does
            self._say(f"photinus: {text}\n", False)

    def _enqueue(self, message: Mapping[str, Any]) -> None:
        self._came.put(message)
        os.eventfd_write(self.fd, 1)
