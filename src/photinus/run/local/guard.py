"""Ends everything that a job has started: what outlives a killed launcher, and (`as_subreaper`) what outlives a worker.

A worker asks the kernel to die with its launcher (see `worker`), but its children (data loaders, compilers) do not.
The guard is a process forked from the launcher before any threads are there: small, in a session of its
own, deaf to Ctrl-C. It reads a pipe whose other end only the launcher holds. The launcher writes down each worker's
process group, and kills the guard when it leaves in good order. When the pipe ends, the launcher was killed, and the
guard kills those groups, and removes the folders that the launcher named.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import time
from collections.abc import Iterator

from .interrupts import SIGNALS

_PR_SET_CHILD_SUBREAPER = 36
_DYING_S = 5.0


class Guard:
    """The launcher's end of the guard. Made by `start_guard`; one thread only."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self._pipe = pipe

    def protect(self, process_group: int) -> None:
        """From now on the group ends with the launcher, however that ends."""
        self._write(b"protect %d\n" % process_group)

    def release(self, process_group: int) -> None:
        """The group has ended (its number may soon be another's)."""
        self._write(b"release %d\n" % process_group)

    def remove(self, folder: str) -> None:
        """When the launcher has been killed, this folder goes, too; else the launcher removes it."""
        self._write(b"remove %s\n" % os.fsencode(folder).hex().encode())

    def close(self) -> None:
        """The launcher leaves in good order: the guard has nothing to do, and ends before its pipe does."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._pipe)

    def _write(self, line: bytes) -> None:
        # Somebody killed the guard. The workers still die with the launcher; only their children lose protection.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, line)


@contextlib.contextmanager
def start_guard() -> Iterator[Guard]:
    """A guard for the duration of the block. To be entered before any thread is started: it forks without exec."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _stand_guard(reading)
        finally:
            os._exit(0)
    os.close(reading)
    guard = Guard(pid, writing)
    try:
        yield guard
    finally:
        guard.close()


@contextlib.contextmanager
def as_subreaper() -> Iterator[None]:
    """During the block, orphans among this process's descendants become its children.

    So the children of a killed worker can be waited for, instead of being left to process 1 (in a container often
    a program that never buries anybody).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # refused only by kernels before 3.4; then process 1 adopts
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _stand_guard(reading: int) -> None:
    for number in (*SIGNALS, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.setsid()
    # A pipe or terminal of the launcher must not stay open because of the guard; nor a folder stay busy.
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != reading:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                os.close(descriptor)
    os.chdir("/")
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:
        name.write("photinus-guard")

    groups: set[int] = set()
    folders: list[bytes] = []
    with open(reading, "rb") as lines:
        for line in lines:
            word, value = line.split()
            if word == b"protect":
                groups.add(int(value))
            elif word == b"release":
                groups.discard(int(value))
            else:
                folders.append(bytes.fromhex(value.decode()))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + _DYING_S
    while folders and time.monotonic() < deadline:  # those just killed may still write
        folders = [folder for folder in folders if os.path.lexists(folder)]
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)
