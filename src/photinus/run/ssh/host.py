"""Hosts, seen from the place where the user typed: the command that reaches each of them, and what comes and goes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...job.own_address import is_loopback, reaches_from
from ...version import __version__
from ..local.interrupts import Interrupts
from ..local.output import write_all
from .command import CONNECT_S, MARK, remote_command
from .hostfile import Host

_LINE_LIMIT_BYTES = 64 * 1024


@dataclass
class Screen:
    """The destination of stdout or stderr.

    Attributes:
        open_line: what was written last is a line that has not ended yet.
        gives_up: asked now and then while its reader takes nothing; see `write_all`.
    """

    target: int
    open_line: bool = False
    gives_up: Callable[[], bool] = lambda: False

    @property
    def terminal(self) -> bool:
        """Return whether it is a terminal."""
        return os.isatty(self.target)

    def write(self, data: bytes) -> None:
        """Writes as it is."""
        if data:
            self.open_line = data[-1:] not in (b"\n", b"\r")
            write_all(self.target, data, self.gives_up)

    def write_lines(self, data: bytes) -> None:
        """Writes whole lines, on a line of their own."""
        if self.terminal:
            data = b"\r\x1b[K" + data  # in the place of a progress bar, which draws itself again below
        elif self.open_line:
            data = b"\n" + data
        self.write(data)


@dataclass
class HostLines:
    """One stream of one host on its way to the screen. `first`: the host runs rank 0."""

    screen: Screen
    first: bool
    _pending: bytes = b""

    def take(self, data: bytes) -> None:
        """More of the stream has come."""
        self._pending += data
        # A progress bar goes back to the line's start: up to there nothing is torn.
        end = self._pending.rfind(b"\n") + 1
        if self.first:
            end = max(end, self._pending.rfind(b"\r") + 1)
        if not end and len(self._pending) > _LINE_LIMIT_BYTES:
            self._pending += b"" if self.first else b"\n"
            end = len(self._pending)
        ready, self._pending = self._pending[:end], self._pending[end:]
        if ready:
            (self.screen.write if self.first else self.screen.write_lines)(ready)

    def show_rest(self) -> None:
        """Shows the line that has not ended, as far as it has come."""
        rest, self._pending = self._pending, b""
        if self.first:
            self.screen.write(rest)
        elif rest:
            self.screen.write_lines(rest + b"\n")


LOST = 255
"""What ssh ends with when it has lost the connection."""
_READ_BYTES = 64 * 1024
_SAID_LIMIT_BYTES = 64 * 1024
_STEP_S = 0.05
# For the commands that reach the hosts to end by themselves, when all is over.
_PATIENCE_S, _HASTE_S = 1.0, 0.1
# ssh gives up by itself after CONNECT_S; the rest is for a Python that starts from a slow file system.
HELLO_S = CONNECT_S + 22.0


class RemoteHost:
    """A host, the command that reaches it, and what was started there.

    Args:
        host: where.
        selector: gets a function for each descriptor, to be called when that is ready.
        here: it is this host: a child process takes the place of ssh.
        ssh: how to reach it.
        silence_s: after about so long without a sign of life ssh gives up.

    Attributes:
        answers: messages from it that nobody has taken yet.
        output: pieces of the job's output ("out" or "err", bytes) that nobody has taken yet.
        hello: who it says it is; None until it has.
        ended: exit code of its `photinus run`; None until that has ended. LOST: ssh's own, or perhaps the script's.
        trouble: why nothing more is to be expected of it; None as long as all is well.
        process: the command that reaches it; when its stdin is closed, the host ends what was started there.
    """

    def __init__(
        self,
        host: Host,
        selector: selectors.BaseSelector,
        *,
        here: bool,
        ssh: str = "ssh",
        silence_s: float = 30.0,
    ) -> None:
        self.host = host
        self.name = host.name
        self.here = here
        self.answers: deque[dict[str, Any]] = deque()
        self.output: deque[tuple[str, bytes]] = deque()
        self.hello: dict[str, Any] | None = None
        self.ended: int | None = None
        self.trouble: str | None = None
        self._selector = selector
        self._ssh = ssh
        self._is_running = False  # `photinus run`: what comes from now on is its output
        self._buffers = {"out": b"", "err": b""}
        self._marked = False
        self._unsent = bytearray()
        self._started_at_s = time.monotonic()
        self.process = process = subprocess.Popen(
            remote_command(host, here=here, ssh=ssh, silence_s=silence_s),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C in the terminal is for us: we pass it on, and the host answers through this process.
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._in = process.stdin.fileno()
        os.set_blocking(self._in, False)  # one host that takes nothing must not hold up the others, nor Ctrl-C
        self._open = {process.stdout.fileno(): "out", process.stderr.fileno(): "err"}
        for descriptor in self._open:
            selector.register(descriptor, selectors.EVENT_READ, partial(self._read, descriptor))

    @property
    def on_this_machine(self) -> bool:
        """Return whether it is this machine, with or without ssh in between."""
        address = None if self.hello is None else self.hello["address"]
        return self.here or (address is not None and is_loopback(address))

    @property
    def done(self) -> bool:
        """Return whether it has ended or failed."""
        return self.ended is not None or self.trouble is not None

    def send(self, order: dict[str, Any]) -> None:
        """Tells it to do something. What it cannot be told any more is lost: `trouble` will say why."""
        self._write(json.dumps(order).encode() + b"\n")
        self._is_running = order["do"] == "run"

    def pass_signal(self, number: int | None) -> None:
        """Passes a signal on to its `photinus run`; None only says that somebody is still here."""
        self._write(b"\n" if number is None else b"%d\n" % number)

    def check(self) -> None:
        """Notes that the command has ended, or that nothing answers."""
        if self.done:
            return
        self._flush()
        status = self.process.poll()
        if status is not None and not self._more_to_read():
            out, err = (self._buffers[name].decode(errors="replace") for name in ("out", "err"))
            if self._is_running:
                self.ended = 128 - status if status < 0 else status
            elif self._marked:
                last = [text.strip() for text in err.splitlines() if text.strip()][-1:]
                self.trouble = f"host {self.name}: ssh lost the connection" + (f" ({last[0]})." if last else ".")
            else:
                how = f"was killed by signal {-status}" if status < 0 else f"exited with code {status}"
                output = (err.strip() or out.strip() or "it printed nothing").rstrip(".")
                by_hand = f"{self._ssh} {self.host.destination} {sys.executable} -m photinus --version"
                self.trouble = f"host {self.name}: ssh {how}: {output}. Try by hand: {by_hand}"
        elif self.hello is None and time.monotonic() > self._started_at_s + HELLO_S:
            self.trouble = (
                f"host {self.name}: no answer within {HELLO_S:.0f} s, though ssh did not fail. Try by hand: "
                f"{self._ssh} {self.host.destination} true"
            )

    def _write(self, data: bytes) -> None:
        if not self.done:
            self._unsent += data
            self._flush()

    def _flush(self) -> None:
        with contextlib.suppress(OSError):  # it takes no more now; or it is gone, and its end is seen apart
            while self._unsent:
                del self._unsent[: os.write(self._in, self._unsent)]

    def _more_to_read(self) -> bool:
        """Return whether output of the ended command has not been read yet."""
        poll = select.poll()
        for descriptor in self._open:
            poll.register(descriptor, select.POLLIN)
        return any(happened & select.POLLIN for _, happened in poll.poll(0))

    def _read(self, descriptor: int) -> None:
        data, name = os.read(descriptor, _READ_BYTES), self._open[descriptor]
        if not data:
            del self._open[descriptor]
            self._selector.unregister(descriptor)
        elif self._is_running:
            self.output.append((name, data))
        else:
            self._buffers[name] = (self._buffers[name] + data)[-_SAID_LIMIT_BYTES:]
            if name == "out":
                self._take_answers()

    def _take_answers(self) -> None:
        if not self._marked:
            _, mark, after = self._buffers["out"].partition(MARK)  # a shell's start-up files may have printed something
            if not mark:
                return
            self._marked, self._buffers["out"] = True, after
        *lines, self._buffers["out"] = self._buffers["out"].split(b"\n")
        for line in lines:
            try:
                self._take_answer(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                self.trouble = f"host {self.name}: the answer is not valid ({error})."

    def _take_answer(self, answer: dict[str, Any]) -> None:
        if "hello" in answer:
            self.hello = answer["hello"]
            theirs = answer["hello"]["photinus"]
            if theirs != __version__:
                self.trouble = (
                    f"host {self.name}: Photinus {theirs} is installed there, and {__version__} here. All hosts need "
                    f"the same version."
                )
        elif "trouble" in answer:
            self.trouble = f"host {self.name}: {answer['trouble']}"
        else:
            self.answers.append(answer)


class Hosts:
    """Several hosts, reached side by side. Made, used and closed by one thread."""

    def __init__(self, interrupts: Interrupts) -> None:
        self.all: list[RemoteHost] = []
        self._interrupts = interrupts
        self._selector = selectors.DefaultSelector()
        self._selector.register(interrupts.fd, selectors.EVENT_READ, interrupts.drain)

    def add(self, host: Host, **options: Any) -> RemoteHost:
        """Starts the command that reaches one more; for the options see RemoteHost."""
        self.all.append(RemoteHost(host, self._selector, **options))
        return self.all[-1]

    def pump(self, timeout_s: float) -> None:
        """Waits until something comes from a host, a signal comes or the time is over, and takes it in."""
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            key.data()
        for host in self.all:
            host.check()

    def wait(self, enough: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until it is enough, or a signal has come; False when it is not enough in time."""
        deadline = time.monotonic() + timeout_s
        while not self._interrupts.received and not enough():
            if time.monotonic() > deadline:
                return False
            self.pump(_STEP_S)
        return True

    def reach(self) -> None:
        """Waits until each host has said hello or is in trouble. Ends early at a signal."""
        # When one is in trouble, others may be too, and are named with it; but not for ever.
        all_in_trouble_s = time.monotonic() + CONNECT_S + 1.0
        while not self._interrupts.received and not all(host.hello is not None or host.done for host in self.all):
            if time.monotonic() > all_in_trouble_s and any(host.trouble for host in self.all):
                return
            self.pump(_STEP_S)

    def pass_signal(self, number: int | None) -> None:
        """Passes a signal on to all; None only says that somebody is still here."""
        for host in self.all:
            host.pass_signal(number)

    def meeting_place(self, host: RemoteHost) -> dict[str, Any]:
        """Return other addresses on which a host may listen, and whether all hosts are on this machine."""
        elsewhere = [each.hello for each in self.all if each.hello is not None and not each.on_this_machine]
        own = None if host.hello is None else host.hello["address"]
        if host.here:  # the address of this machine that it uses towards the others
            own = elsewhere[0]["seen"] if elsewhere else None
            with contextlib.suppress(OSError):
                own = reaches_from(elsewhere[0]["address"]) if own is not None else None
        return {"otherwise": own, "alone": not elsewhere}

    def leave(self) -> None:
        """Ends all lifelines, waits a moment for the commands to end, ends those that do not, and forgets all."""
        for host in self.all:
            assert host.process.stdin is not None
            host.process.stdin.close()
        patience_s = _HASTE_S if self._interrupts.received else _PATIENCE_S
        for number, wait_s in ((None, patience_s), (signal.SIGTERM, 0.3), (signal.SIGKILL, 0.0)):
            deadline = time.monotonic() + wait_s
            for host in self.all:
                if number is not None:
                    host.process.send_signal(number)
            while any(host.process.poll() is None for host in self.all) and time.monotonic() < deadline:
                time.sleep(0.005)
        for host in self.all:
            with host.process:  # waits for it, and closes its pipes
                pass
        self._selector.close()
