"""The `photinus run` that the far side of a host starts: its process, its output, its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from ...env import LISTEN_FD

__all__ = ["FarJob", "safe_path"]

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


class FarJob:
    """A launcher in a process of its own, so that nothing which it does or waits for can keep the far side from acting.

    Args:
        words: what stands after `photinus run`.
        environ: its whole environment.
        merged: stdout and stderr end at the same place, so their order is kept in one pipe.
        listener: a socket that it shall inherit, as PHOTINUS_LISTEN_FD.

    Attributes:
        outputs: descriptor -> kind of frame ("o", "e"), as long as it is open.
        pidfd: readable once the launcher has ended.
    """

    def __init__(
        self, words: Sequence[str], environ: Mapping[str, str], *, merged: bool, listener: socket.socket | None
    ) -> None:
        libc = ctypes.CDLL(None)
        environ = dict(environ)
        if listener is not None:
            environ[LISTEN_FD.name] = str(listener.fileno())
        self._process = subprocess.Popen(
            [sys.executable, *safe_path(), "-m", "photinus", "run", *words],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            pass_fds=() if listener is None else (listener.fileno(),),
            # It ends in order, with all its workers, when the far side is killed.
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )
        self.outputs = {
            stream.fileno(): kind
            for stream, kind in ((self._process.stdout, b"o"), (self._process.stderr, b"e"))
            if stream is not None
        }
        self.pidfd = os.pidfd_open(self._process.pid)
        self._kill_at_s: float | None = None
        self._ended_at_s = 0.0

    def read(self, descriptor: int) -> bytes:
        """More of one output; b"" at its end, after which it is not in `outputs` any more."""
        data = os.read(descriptor, _READ_BYTES)
        if not data:
            del self.outputs[descriptor]
        return data

    def ask(self, number: int) -> None:
        """Passes a signal on to the launcher. From the first on, it has seconds to end."""
        if self._process.poll() is None:
            self._process.send_signal(number)
            if self._kill_at_s is None:
                self._kill_at_s = time.monotonic() + _LEAVE_S

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
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        return 128 - status if status < 0 else status
