"""The `photinus run` that the far side of a host starts: its process, its output, its end."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...env import LISTEN_FD
from ..workers.interrupts import FROM_A_KEYBOARD

__all__ = ["FarJob", "Outputs", "safe_path"]

_PR_SET_PDEATHSIG = 1
_READ_BYTES = 64 * 1024
# After it was asked to end: the launcher gives its workers 1.5 s, and some moments are its own.
_LEAVE_S = 4.0
_REST_S = 0.5


def safe_path() -> list[str]:
    """The option that keeps the working directory off sys.path, where this Python has it.

    A folder named photinus in it is not ours. The workers are started without.
    """
    return ["-P"] if sys.version_info >= (3, 11) else []


@dataclass(frozen=True)
class Outputs:
    """What the launcher's stdout and stderr shall look like to it, as they do where the user typed.

    Attributes:
        merged: both end at the same place, so their order is kept in one pipe.
        stdout, stderr: whether it is a terminal: rank 0 then has its colours and its progress bar.
        rows, columns: size of the terminal.
    """

    merged: bool
    stdout: bool = False
    stderr: bool = False
    rows: int = 24
    columns: int = 80

    def open(self, terminal: bool) -> tuple[int, int]:
        """The reading end and the launcher's end of one output."""
        if not terminal:
            return os.pipe()
        ours, theirs = os.openpty()
        settings = termios.tcgetattr(theirs)
        settings[1] &= ~termios.OPOST  # bytes pass as they are; the terminal at the other end does the rest
        settings[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(theirs, termios.TCSANOW, settings)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", self.rows, self.columns, 0, 0))
        return ours, theirs


class FarJob:
    """A launcher in a process of its own, so that nothing which it does or waits for can keep the far side from acting.

    Args:
        words: what stands after `photinus run`.
        environ: its whole environment.
        outputs: what its stdout and stderr are.
        listener: a socket that it shall inherit, as PHOTINUS_LISTEN_FD.
        grace_s: seconds that it gives its workers when it is asked to end.

    Attributes:
        outputs: descriptor -> kind of frame ("o", "e"), as long as it is open.
        pidfd: readable once the launcher has ended.
    """

    def __init__(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        *,
        outputs: Outputs,
        listener: socket.socket | None,
        grace_s: float,
    ) -> None:
        libc = ctypes.CDLL(None)
        environ = dict(environ)
        if listener is not None:
            environ[LISTEN_FD.name] = str(listener.fileno())
        ours, stdout = outputs.open(outputs.stdout)
        self.outputs, theirs = {ours: b"o"}, [stdout]
        if outputs.merged:
            stderr = stdout
        else:
            ours, stderr = outputs.open(outputs.stderr)
            self.outputs[ours] = b"e"
            theirs.append(stderr)
        self._process = subprocess.Popen(
            [sys.executable, *safe_path(), "-m", "photinus", "run", *words],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=() if listener is None else (listener.fileno(),),
            # It ends in order, with all its workers, when the far side is killed.
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )
        for descriptor in theirs:
            os.close(descriptor)
        self.pidfd = os.pidfd_open(self._process.pid)
        self._grace_s = grace_s
        self._kill_at_s: float | None = None
        self._ended_at_s = 0.0

    def read(self, descriptor: int) -> bytes:
        """More of one output; b"" at its end, after which it is not in `outputs` any more."""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except OSError:  # how a terminal tells that nobody has its other end open
            data = b""
        if not data:
            os.close(descriptor)
            del self.outputs[descriptor]
        return data

    def ask(self, number: int) -> None:
        """Passes a signal on to the launcher, which then has to end: in seconds, or after the grace of its workers."""
        if self._process.poll() is None:
            self._process.send_signal(number)
            at_once = number in FROM_A_KEYBOARD or self._kill_at_s is not None
            self._kill_at_s = time.monotonic() + _LEAVE_S + (0.0 if at_once else self._grace_s)

    def kill_overdue(self) -> None:
        """Kills a launcher that was asked to end and did not; its guard ends the workers."""
        if self._kill_at_s is not None and time.monotonic() > self._kill_at_s and self._process.poll() is None:
            self._process.kill()

    def ended(self) -> bool:
        """Whether the launcher has ended, and its output been read (or held open by somebody for too long)."""
        if self._process.poll() is None:
            return False
        self._ended_at_s = self._ended_at_s or time.monotonic()
        return not self.outputs or time.monotonic() > self._ended_at_s + _REST_S

    def code(self) -> int:
        """Its exit code, 128 + the signal if one ended it. To be called once it has ended."""
        status = self._process.wait()
        os.close(self.pidfd)
        for descriptor in self.outputs:
            os.close(descriptor)
        return 128 - status if status < 0 else status
