"""The workers' output in files: DIR/JOB/attempt_K/RANK/stdout.log and stderr.log, torchrun's layout.

What goes where is decided per stream and local rank, with torchrun's flags (docs/how-to/output.md has the table).
`--local-ranks-filter` takes ranks off the terminal and leaves their files. Torchrun alone writes nothing for a bare
--log-dir; whoever gives a folder wants something in it. RANK is the rank in the job, not on its host, so that several
hosts can share a folder. Files are appended to: nothing of an earlier job of the same name is lost.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from ...errors import UsageError
from ...job.spec import LogSpec

Streams = frozenset[str]
BOTH: Streams = frozenset({"out", "err"})
_FILE_NAMES = {"out": "stdout.log", "err": "stderr.log"}
_PROBE_BYTES = 4096


class Logs:
    """Destinations of the output of this host's workers. Nothing is made before `open`.

    Attributes:
        base: the user's DIR, or a temporary folder; None when nothing is written, and before `open`.
    """

    def __init__(self, spec: LogSpec) -> None:
        self.base: Path | None = None
        self._spec = spec
        self._redirects, self._tee = spec.redirects or {}, spec.tee or {}
        if spec.log_dir is not None and spec.redirects is None and spec.tee is None:
            self._tee = {-1: BOTH}

    def file_streams(self, local_rank: int) -> Streams:
        """The streams of a worker that are written to files."""
        return _of(self._redirects, local_rank) | _of(self._tee, local_rank)

    def terminal_streams(self, local_rank: int) -> Streams:
        """The streams of a worker that are written to the terminal."""
        ranks = self._spec.shown_local_ranks
        if ranks is not None and local_rank not in ranks:
            return frozenset()
        return BOTH - (_of(self._redirects, local_rank) - _of(self._tee, local_rank))

    @property
    def writes(self) -> bool:
        """Return whether anything is written to files."""
        return any(self._redirects.values()) or any(self._tee.values())

    def check(self, local_world_size: int) -> None:
        """Raises UsageError when a flag names a worker that this host does not have."""
        visible = dict.fromkeys(self._spec.shown_local_ranks or (), BOTH)
        for flag, ranks in (("--redirects", self._redirects), ("--tee", self._tee), ("--local-ranks-filter", visible)):
            absent = [rank for rank in ranks if rank >= local_world_size]
            if absent:
                there = "only local rank 0" if local_world_size == 1 else f"local ranks 0 to {local_world_size - 1}"
                raise UsageError(f"{flag} names local rank {min(absent)}, but this host runs {there}.")

    def describe(self, folder: Path | None = None) -> str:
        """In a line, for people."""
        where = folder or self._spec.log_dir or "a temporary folder"
        everything = all(_of(self._tee, rank) == BOTH for rank in (-1, *self._tee))
        return f"{'all output also' if everything else 'logs'} in {where}"

    def open(self) -> None:
        """Makes DIR and tries whether it can be written to: refused now rather than while training.

        Raises:
            UsageError: it cannot.
        """
        if not self.writes:
            return
        base = self._spec.log_dir
        try:
            if base is None:
                base = tempfile.mkdtemp(prefix="photinus-logs-")
            Path(base).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=base, buffering=0) as probe:
                if probe.write(bytes(_PROBE_BYTES)) < _PROBE_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise UsageError(
                f"--log-dir {base}: cannot write there: {error.strerror}. Give another folder, or remove the flag."
            ) from error
        self.base = Path(base)

    def folder(self, job_id: str) -> Path | None:
        """DIR/JOB, the folder of a job; None when nothing is written."""
        return None if self.base is None else self.base / (re.sub(r"[^\w.+-]", "_", job_id) or "job")

    def files(self, job_id: str, attempt: int, rank: int, local_rank: int) -> dict[str, Path]:
        """The file of each stream of a worker that has one."""
        folder = self.folder(job_id)
        if folder is None:
            return {}
        place = folder / f"attempt_{attempt}" / str(rank)
        return {stream: place / _FILE_NAMES[stream] for stream in sorted(self.file_streams(local_rank))}


def _of(streams: Mapping[int, Streams], local_rank: int) -> Streams:
    return streams.get(local_rank, streams.get(-1, frozenset()))


class LogFile:
    """One stream of a worker in a file. What goes wrong is told once, and is no reason to end the training."""

    def __init__(self, path: Path, fail: Callable[[Path, OSError], None]) -> None:
        self.path = path
        self._fail = fail
        self._file: int | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            fail(path, error)

    def write(self, data: bytes) -> bool:
        """Adds bytes; False when they are not in the file."""
        if self._file is None:
            return False
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self.close()
            self._fail(self.path, error)
            return False
        return True

    def close(self) -> None:
        """No more is written. May be called again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
