"""Keeps a second job out of a run's folder: its checkpoints and numbers would be mixed with those of the first.

A POSIX record lock on a file in the folder, held by rank 0. The kernel lets go of it when the process ends, however
that happens, and children that were forked meanwhile (a data loader's workers) do not keep it, as they would keep
flock's. Between hosts it holds where the shared file system passes locks on: NFS does (a host that dies keeps its lock
until the server's lease is over, 90 s as a rule), Lustre when mounted with `flock`. Where there are no locks, a warning
says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
import warnings
from pathlib import Path

from ... import env
from ...errors import PhotinusError
from ...parallel.exchange.agreement import gather_per_rank
from ...runlog.files import plain_file
from ..checkpoint.durable import NO_LOCKS

_NAME = ".run.lock"
# The worker of an attempt before this one may still be dying on a host that was cut off.
_AFTER_A_RESTART_S = 10.0

_held: dict[Path, RunLock] = {}  # by this process; record locks know processes, so it cannot lock itself out


def ranks_without(folder: Path, lock: RunLock | None) -> list[int]:
    """The ranks that do not see rank 0's folder of the run, by its lock (None on other ranks). Called by all ranks."""
    owner = "" if lock is None else lock.owner
    with contextlib.suppress(OSError, PhotinusError):
        if lock is None:  # rank 0 would let go of it
            with open(folder / _NAME, encoding="utf-8", errors="replace", opener=plain_file) as file:
                owner = file.read(200)
    owners = gather_per_rank(owner)
    return [rank for rank, seen in enumerate(owners) if seen != owners[0]]


class RunLock:
    """Holds a run's folder, made if it is not there, until `close`. In one process, a later lock takes over.

    Raises:
        PhotinusError: another process holds it; says which, on which host.
        OSError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder.resolve() / _NAME
        self.owner = f"pid {os.getpid()} on host {socket.gethostname()}"
        self._descriptor = self._taken_over()
        if self._descriptor is None:
            self._descriptor = plain_file(self._path, os.O_RDWR | os.O_CREAT)
            try:
                self._lock(self._descriptor)
            except BaseException:
                self.close()
                raise
        _held[self._path] = self

    def close(self) -> None:
        """Lets go of the folder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held.pop(self._path, None)

    def _taken_over(self) -> int | None:
        """The descriptor of this process's lock on the folder. (Closing any other one would end that lock.)"""
        before = _held.get(self._path)
        if before is None or before._descriptor is None or not self._path.exists():
            return None
        if not os.path.samestat(os.fstat(before._descriptor), self._path.stat()):  # of a folder that was removed
            return None
        descriptor, before._descriptor = before._descriptor, None
        return descriptor

    def _lock(self, descriptor: int) -> None:
        deadline = time.monotonic() + (_AFTER_A_RESTART_S if env.ATTEMPT.get() > 0 else 0.0)
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in NO_LOCKS:
                    warnings.warn(
                        f"{self._path.parent} has no locks ({error.strerror}): nothing keeps a second job out of it",
                        stacklevel=4,
                    )
                    break
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                if time.monotonic() >= deadline:
                    raise PhotinusError(self._describe_holder(descriptor)) from None
                time.sleep(0.1)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, self.owner.encode(), 0)
        os.fsync(descriptor)  # for ranks on other hosts, see `ranks_without`

    def _describe_holder(self, descriptor: int) -> str:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        return (
            f"{self._path.parent} belongs to a job that is running: rank 0 is {holder}. Two jobs would overwrite each "
            f"other's checkpoints. Give this one another folder (out=...), or end that one first."
        )
