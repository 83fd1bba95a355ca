"""One host, seen from the place where the user typed: the command that reaches it, and what comes and goes."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from ...version import __version__
from ...world.own_address import reaches_from
from ..workers.interrupts import Interrupts
from .command import CONNECT_S, far_command
from .hostfile import Host
from .remote_frames import FrameError, Frames, line
from .trouble import trouble

__all__ = ["FarHost", "address_towards", "leave", "pump", "reach"]

_READ_BYTES = 64 * 1024
_SAID_LIMIT_BYTES = 64 * 1024
_STEP_S = 0.5
# ssh gives up by itself after CONNECT_S; the rest is for a Python that starts from a slow file system.
HELLO_S = CONNECT_S + 22.0


class FarHost:
    """A host and its far side. Made, used and closed by one thread.

    Args:
        host: where.
        here: it is this host: a child process takes the place of ssh.
        ssh, ssh_port: how to reach it.
        any_version: another version of Photinus there is no trouble.

    Attributes:
        answers: messages from it that nobody has taken yet.
        output: pieces of the job's output ("o" or "e", bytes) that nobody has taken yet.
        hello: who it says it is; None until it has.
        heard_at_s: when something came from it last (monotonic clock).
        ended: exit code of its `photinus run`; None until that has ended.
        trouble: why nothing more is to be expected of it; None as long as all is well.
    """

    def __init__(
        self, host: Host, *, here: bool, ssh: str = "ssh", ssh_port: int | None = None, any_version: bool = False
    ) -> None:
        self.host = host
        self._any_version = any_version
        self.here = here
        self.answers: deque[dict[str, Any]] = deque()
        self.output: deque[tuple[bytes, bytes]] = deque()
        self.hello: dict[str, Any] | None = None
        self.ended: int | None = None
        self.trouble: str | None = None
        self._ssh = ssh if ssh_port is None else f"{ssh} -p {ssh_port}"
        self._frames = Frames()
        self._said = b""
        self._unsent = bytearray()
        self._started_at_s = self.heard_at_s = time.monotonic()
        self._status: int | None = None
        self._process = subprocess.Popen(
            far_command(host, here=here, ssh=ssh, ssh_port=ssh_port),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C in the terminal is for us: we pass it on, and the far side answers through this process.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._in, self._out, self._err = (
            stream.fileno() for stream in (self._process.stdin, self._process.stdout, self._process.stderr)
        )
        os.set_blocking(self._in, False)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._open = {self._out, self._err}

    @property
    def name(self) -> str:
        """The host's name as the user typed it."""
        return self.host.name

    @property
    def on_this_machine(self) -> bool:
        """Whether it is this machine, with or without ssh in between."""
        address = None if self.hello is None else self.hello["address"]
        return self.here or (address is not None and ipaddress.ip_address(address.partition("%")[0]).is_loopback)

    @property
    def done(self) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.ended is not None or self.trouble is not None

    def send(self, order: dict[str, Any]) -> None:
        """Tells the far side to do something. What it cannot be told any more is lost: `trouble` will say why."""
        if not self.done:
            self._unsent += line(order)
            self._flush()

    def events(self) -> dict[int, int]:
        """Descriptors to wait for, and for what."""
        wanted = dict.fromkeys(self._open, select.POLLIN)
        if self._unsent:
            wanted[self._in] = select.POLLOUT
        if self._status is None:
            wanted[self._pidfd] = select.POLLIN
        return wanted

    def react(self, descriptor: int) -> None:
        """Does what can be done now that a descriptor is ready."""
        if descriptor == self._in:
            self._flush()
        elif descriptor == self._pidfd:
            self._status = self._process.wait()
        elif descriptor in self._open:
            self._read(descriptor)

    def judge(self) -> None:
        """Notes trouble: the command has ended without a word that the job did, or the far side does not answer."""
        if self.done:
            return
        if self._status is not None and not (self._open and self._more_to_read()):
            said = self._said.decode(errors="replace")
            printed = self._frames.noise.decode(errors="replace")
            if self._frames.marked:
                last = [text.strip() for text in said.splitlines() if text.strip()][-1:]
                self.trouble = f"host {self.name}: the connection to it was lost" + (f" ({last[0]})." if last else ".")
            else:
                self.trouble = trouble(self.host.destination, self._ssh, self._status, said, printed)
        elif self.hello is None and time.monotonic() > self._started_at_s + HELLO_S:
            self.trouble = (
                f"host {self.name}: no answer within {HELLO_S:.0f} s, though ssh did not fail. Try by hand: "
                f"{self._ssh} {self.host.destination} true"
            )

    def close(self) -> None:
        """Ends the lifeline, so that the far side ends what it has started."""
        with contextlib.suppress(OSError):  # what is unsent is of no use any more
            assert self._process.stdin is not None
            self._process.stdin.close()

    def gone(self) -> bool:
        """Whether the command that reaches it has ended."""
        return self._process.poll() is not None

    def end(self, number: signal.Signals) -> None:
        """Sends a signal to the command that reaches it, unless it has ended."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def forget(self) -> None:
        """Lets go of everything, once the command has ended."""
        self._process.wait()
        os.close(self._pidfd)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._in, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # it is gone; its end is seen apart
            self._unsent.clear()

    def _more_to_read(self) -> bool:
        """Whether some of what the ended command wrote has not been read yet."""
        poll = select.poll()
        for descriptor in self._open:
            poll.register(descriptor, select.POLLIN)
        return any(happened & select.POLLIN for _, happened in poll.poll(0))

    def _read(self, descriptor: int) -> None:
        data = os.read(descriptor, _READ_BYTES)
        if not data:
            self._open.discard(descriptor)
        elif descriptor == self._err:
            self._said = (self._said + data)[-_SAID_LIMIT_BYTES:]
        else:
            self.heard_at_s = time.monotonic()
            try:
                for kind, content in self._frames.take(data):
                    self._heed(kind, content)
            except (FrameError, ValueError, KeyError) as error:
                self.trouble = f"host {self.name}: its far side does not speak as expected ({error})."

    def _heed(self, kind: bytes, content: bytes) -> None:
        if kind != b"j":
            self.output.append((kind, content))
            return
        import json

        answer = json.loads(content)
        if "hello" in answer:
            self.hello = answer["hello"]
            theirs = answer["hello"]["photinus"]
            if theirs != __version__ and not self._any_version:
                self.trouble = (
                    f"host {self.name}: it has Photinus {theirs}, and here is {__version__}. All hosts of a job need "
                    f"the same version."
                )
        elif "ended" in answer:
            self.ended = int(answer["ended"])
        elif "trouble" in answer:
            self.trouble = f"host {self.name}: {answer['trouble']}"
        elif "beat" not in answer:
            self.answers.append(answer)


def pump(hosts: Sequence[FarHost], timeout_s: float, *also: int) -> None:
    """Waits until something comes from a host (or `also` is readable) or the time is over, and takes it in."""
    poll = select.poll()
    owners: dict[int, FarHost] = {}
    for far in hosts:
        for descriptor, events in far.events().items():
            poll.register(descriptor, events)
            owners[descriptor] = far
    for descriptor in also:
        poll.register(descriptor, select.POLLIN)
    for descriptor, _ in poll.poll(max(0.0, timeout_s) * 1000):
        if descriptor in owners:
            owners[descriptor].react(descriptor)
    for far in hosts:
        far.judge()


def leave(hosts: Sequence[FarHost], patience_s: float = 1.0) -> None:
    """Ends all lifelines, waits a moment for the commands to end, ends those that do not, and forgets all."""
    for far in hosts:
        far.close()
    for number, wait_s in ((None, patience_s), (signal.SIGTERM, 0.3), (signal.SIGKILL, 0.0)):
        deadline = time.monotonic() + wait_s
        for far in hosts:
            if number is not None:
                far.end(number)
        while not all(far.gone() for far in hosts) and time.monotonic() < deadline:
            time.sleep(0.005)
    for far in hosts:
        far.forget()


def reach(hosts: Sequence[FarHost], interrupts: Interrupts) -> list[str]:
    """Waits until each host has said hello or is in trouble, and returns the troubles. Ends early at a signal."""
    first_trouble_s: float | None = None
    begun_s = time.monotonic()
    while not interrupts.received and any(far.hello is None and not far.done for far in hosts):
        if first_trouble_s is None and any(far.trouble for far in hosts):
            first_trouble_s = time.monotonic()
        # Others may be in trouble too, and are named with it; but not for ever.
        if first_trouble_s is not None and time.monotonic() > max(first_trouble_s, begun_s + CONNECT_S + 1.0):
            break
        pump(hosts, _STEP_S, interrupts.fd)
        interrupts.drain()
    return [far.trouble for far in hosts if far.trouble is not None]


def address_towards(far: FarHost) -> str | None:
    """The address of this machine that it uses towards a host."""
    assert far.hello is not None
    there = far.hello["address"]
    if there is None:
        return None
    try:
        return reaches_from(there)
    except OSError:
        seen: str | None = far.hello["seen"]
        return seen
