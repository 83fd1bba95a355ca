"""The lock that keeps a second job out of a run's folder, and by which ranks see whether they share that folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import warnings
from pathlib import Path

from ... import env
from ...errors import PhotinusError
from ...parallel.exchange.agreement import gather_per_rank
from ...runlog.files import plain_file
from ..checkpoint.durable import lock_file

_LOCK = ".run.lock"
# The worker of an attempt before this one may still be dying on a host that was cut off.
_AFTER_A_RESTART_S = 10.0
_held: dict[Path, RunLock] = {}  # by this process; record locks know processes, so it cannot lock itself out


def ranks_without(folder: Path, lock: RunLock | None) -> list[int]:
    """The ranks that do not see rank 0's folder of the run, by its lock (None on other ranks). Called by all ranks."""
    owner = "" if lock is None else lock.owner
    with contextlib.suppress(OSError, PhotinusError):
        if lock is None:  # rank 0 would let go of it
            with open(folder / _LOCK, encoding="utf-8", errors="replace", opener=plain_file) as file:
                owner = file.read(200)
    owners = gather_per_rank(owner)
    return [rank for rank, seen in enumerate(owners) if seen != owners[0]]


class RunLock:
    """Keeps a second job out of a run's folder, made if it is not there, until `close`: their checkpoints would mix.

    A POSIX record lock on a file in the folder, held by rank 0. The kernel lets go of it when the process ends, however
    that happens, and children that were forked meanwhile (a data loader's workers) do not keep it, as they would keep
    flock's. Between hosts it holds where the shared file system passes locks on: NFS does (a host that dies keeps its
    lock until the server's lease is over, 90 s as a rule), Lustre when mounted with `flock`. Where there are no locks,
    a warning says so. In one process, a later lock takes over.

    Raises:
        PhotinusError: another process holds it; says which, on which host.
        OSError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder.resolve() / _LOCK
        self.owner = f"pid {os.getpid()} on host {socket.gethostname()}"
        self._descriptor = self._taken_over()
        if self._descriptor is None:
            self._descriptor = plain_file(self._path, os.O_RDWR | os.O_CREAT)
            patience_s = _AFTER_A_RESTART_S if env.ATTEMPT.get() > 0 else 0.0
            try:
                lacking = lock_file(self._descriptor, fcntl.lockf, self.owner, patience_s, self._refusal)
                os.fsync(self._descriptor)  # for ranks on other hosts, see `ranks_without`
            except BaseException:
                self.close()
                raise
            if lacking:
                text = f"{self._path.parent} has no locks ({lacking}): nothing keeps a second job out of it"
                warnings.warn(text, stacklevel=3)
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

    def _refusal(self, holder: str) -> PhotinusError:
        return PhotinusError(
            f"{self._path.parent} belongs to a job that is running: rank 0 is {holder}. Two jobs would overwrite each "
            f"other's checkpoints. Give this one another folder (out=...), or end that one first."
        )
