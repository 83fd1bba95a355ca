"""A host, seen from the place where the user typed: the command that reaches it, and what goes there and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable
from typing import Any

from ...job.deaths import describe_end
from ...job.own_address import is_loopback
from ...version import __version__
from .command import CONNECT_S, MARK, remote_command
from .hostfile import Host

LOST = 255
"""Exit code of ssh when it has lost the connection; also a script's, by chance."""
# ssh gives up by itself after CONNECT_S; the rest is for a Python that starts from a slow file system.
HELLO_S = CONNECT_S + 22.0
_STEP_S, _LAST_STEPS = 0.05, 3
_READ_BYTES = 64 * 1024
_SHOWN_BYTES = 64 * 1024
_LINE_LIMIT_BYTES = 1 << 20

Show = Callable[[bytes], Awaitable[object]]
"""Takes a piece of output. The next piece is read when it has returned."""


class TroubleError(Exception):
    """A host cannot take part in the job. The message begins with the host's name."""


class RemoteHost:
    """A host, the command that reaches it, and what was started there. All methods run in one asyncio loop.

    Args:
        host: the host.
        here: it is this host: a child process takes the place of ssh.
        ssh: command that reaches it.
        silence_s: ssh gives up after about so many seconds without a sign of life.

    Attributes:
        hello: the host's answer to `reach`: version and addresses.
        ended: exit code of the job's part on this host; None until that has ended.
    """

    def __init__(self, host: Host, *, here: bool, ssh: str = "ssh", silence_s: float = 30.0) -> None:
        self.host, self.name, self.here = host, host.name, here
        self.hello: dict[str, Any] = {"address": None, "seen": None}
        self.ended: int | None = None
        self._process: Process | None = None
        self._is_started = False
        self._ssh, self._silence_s = ssh, silence_s
        self._errors = b""  # until the job's part is started
        self._show_errors: Show | None = None

    @property
    def on_this_machine(self) -> bool:
        """Return whether it is this machine, with or without ssh in between."""
        address = self.hello["address"]
        return self.here or (address is not None and is_loopback(address))

    async def start(self) -> None:
        """Start the command that reaches the host."""
        command = remote_command(self.host, here=self.here, ssh=self._ssh, silence_s=self._silence_s)
        self._process = process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            # Ctrl-C in the terminal is for us: we pass it on, and the host answers through this process.
            start_new_session=True,
            limit=_LINE_LIMIT_BYTES,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._in, self._out, self._err = process.stdin, process.stdout, process.stderr
        self._reading_errors = asyncio.ensure_future(self._show(self._err, self._take_errors))

    async def reach(self) -> None:
        """Wait until the host says who it is.

        Raises:
            TroubleError: it cannot be reached, or has a different version of Photinus.
        """
        try:
            self.hello = await asyncio.wait_for(self._greet(), HELLO_S)
        except asyncio.TimeoutError:
            raise TroubleError(
                f"host {self.name}: no answer within {HELLO_S:.0f} s, though ssh did not fail. Try by hand: "
                f"{self._ssh} {self.host.destination} true"
            ) from None
        theirs = self.hello["photinus"]
        if theirs != __version__:
            raise TroubleError(
                f"host {self.name}: Photinus {theirs} is installed there, and {__version__} here. All hosts need the "
                f"same version."
            )

    async def prepare(self, order: dict[str, Any], within_s: float) -> dict[str, Any]:
        """Send what the host needs to know of the job; return where it listens. TroubleError: it cannot take part."""
        self._send(order)
        try:
            return await asyncio.wait_for(self._answer("prepared"), within_s)
        except asyncio.TimeoutError:
            raise TroubleError(
                f"host {self.name}: no answer within {within_s:.0f} s: its file system may hang, at the folder "
                f"{order['cwd']}."
            ) from None

    async def run(self, order: dict[str, Any], out: Show, err: Show) -> None:
        """Start the job's part on this host, show its output, and set `ended` when it has ended."""
        self._show_errors = err
        self._send(order)
        self._is_started = True
        await asyncio.gather(self._show(self._out, out), self._reading_errors)
        status = await self._exit_status()
        self.ended = 128 - status if status < 0 else status

    @property
    def is_running(self) -> bool:
        """Return whether the job's part on this host was started and has not ended."""
        return self._is_started and self.ended is None

    def pass_signal(self, number: int | None) -> None:
        """Pass a signal on to the job's part on this host; None only says that somebody is still here."""
        if self.is_running:
            self._in.write(b"\n" if number is None else b"%d\n" % number)

    @property
    def is_reached(self) -> bool:
        """Return whether the command that reaches the host runs."""
        return self._process is not None and self._process.returncode is None

    def close_lifeline(self) -> None:
        """Close stdin of the command: the host ends what was started there. What it has not read is dropped."""
        if self._process is not None and not self._in.is_closing():
            self._in.transport.abort()

    def signal_command(self, number: int) -> None:
        """Send a signal to the command that reaches the host, if it runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def close(self) -> None:
        """Close the pipes, also those that a process which the command left behind holds open."""
        if self._process is not None:
            self._process._transport.close()  # type: ignore[attr-defined]  # else asyncio complains when it is collected

    def _send(self, order: dict[str, Any]) -> None:
        self._in.write(json.dumps(order).encode() + b"\n")

    async def _exit_status(self) -> int:
        assert self._process is not None
        while self._process.returncode is None:  # `Process.wait` also waits for whoever holds the pipes
            await asyncio.sleep(_STEP_S)
        return self._process.returncode

    async def _greet(self) -> dict[str, Any]:
        """Return who the host says it is, behind the mark: a shell's start-up files may print something first."""
        try:
            await self._out.readuntil(MARK)
        except asyncio.LimitOverrunError:
            raise TroubleError(f"host {self.name}: its shell prints too much before Photinus starts.") from None
        except asyncio.IncompleteReadError as error:
            status, errors = await self._exit_status(), await self._errors_at_end()
            text = errors.strip() or error.partial.decode(errors="replace").strip() or "it printed nothing"
            text = text.rstrip(".") + (f". All hosts need Photinus {__version__}" if "No module named" in text else "")
            text += f". Try by hand: {self._ssh} {self.host.destination} {sys.executable} -m photinus --version"
            raise TroubleError(f"host {self.name}: ssh {describe_end(status)}: {text}") from None
        return await self._answer("hello")

    async def _answer(self, kind: str) -> dict[str, Any]:
        line = await self._out.readline()
        if not line:
            last = [text.strip() for text in (await self._errors_at_end()).splitlines() if text.strip()][-1:]
            raise TroubleError(f"host {self.name}: ssh lost the connection" + (f" ({last[0]})." if last else "."))
        try:
            answer = json.loads(line)
            if "trouble" not in answer:
                return dict(answer[kind])
        except (ValueError, KeyError, TypeError) as error:
            raise TroubleError(f"host {self.name}: the answer is not valid ({error}).") from None
        raise TroubleError(f"host {self.name}: {answer['trouble']}")

    async def _errors_at_end(self) -> str:
        await asyncio.wait({self._reading_errors})
        return self._errors.decode(errors="replace")

    async def _take_errors(self, data: bytes) -> None:
        if self._show_errors is None:
            self._errors = (self._errors + data)[-_SHOWN_BYTES:]
        else:
            await self._show_errors(data)

    async def _show(self, stream: asyncio.StreamReader, show: Show) -> None:
        """Hand on what comes: until its end, or until the command has ended and nothing is left of what it wrote."""
        silent_steps = 0  # since the command has ended; the end may be noticed before what it wrote
        while silent_steps < _LAST_STEPS:
            try:
                data = await asyncio.wait_for(stream.read(_READ_BYTES), _STEP_S)
            except asyncio.TimeoutError:
                silent_steps += not self.is_reached  # a process that it left behind may hold the other end
                continue
            if not data:
                return
            await show(data)
