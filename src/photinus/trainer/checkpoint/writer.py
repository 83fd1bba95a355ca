"""A process that writes checkpoints while the ranks train on: the end of it in a rank.

A process (writer_process.py) and not a thread, because torch.save holds the interpreter while it goes through a large
tensor. The first state that is large enough starts it, and it imports torch while the ranks train. It inherits a memory
file, reads an order as a line of JSON, writes what the memory holds, and answers with a line of JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import IO, Any

import torch

from ...errors import CheckpointError
from ...job.cgroup import free_memory
from ...job.deaths import name_signal
from ...parallel.exchange.agreement import JSON, error_class

LEAST_BYTES = 64 << 20
"""Below, writing at once costs less than the process."""
_LOOK_EVERY_S = 5.0
_MOST_OF_MEMORY = 0.8  # of what is free


@dataclass(frozen=True)
class Order:
    """The place to write to: a checkpoint in a folder of them, or (where `step` is None) a file of `photinus.save`.

    Attributes:
        path: the folder, or the file.
        step, description, metric: as for CheckpointFolder.save.
        keep_last, best: as for CheckpointFolder.
    """

    path: str
    step: int | None = None
    description: Mapping[str, JSON] = field(default_factory=dict)
    metric: float | None = None
    keep_last: int = 2
    best: str | None = None

    def __str__(self) -> str:
        return self.path if self.step is None else f"the checkpoint of step {self.step} in {self.path}"


class Writer:
    """The end of that process in a rank. One order at a time, by one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._memory = -1
        self._order: Order | None = None
        self._began_s = 0.0

    def has_room(self, needed_bytes: int) -> bool:
        """Return whether a copy of a state fits into the memory of the host and of this control group."""
        has = os.fstat(self._memory).st_size if self._memory >= 0 else 0
        return needed_bytes - has < _MOST_OF_MEMORY * free_memory()

    def write(self, order: Order, content: Mapping[str, Any]) -> None:
        """Copies the content (see PlainState), and lets it be written. The order before must have been collected.

        Raises:
            CheckpointError: there is no memory for it, or the process cannot be started.
        """
        assert self._order is None, "one at a time"
        try:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._start()
            with _MemoryFile(self._memory) as file:
                torch.save(dict(content), file)  # type: ignore[arg-type]
        except OSError as error:
            raise CheckpointError(f"{order} cannot be copied for the process that writes it: {error}") from error
        self._order, self._began_s = order, time.perf_counter()
        with contextlib.suppress(BrokenPipeError):  # `collect` says that it ended
            self._pipes[0].write(json.dumps(asdict(order)).encode() + b"\n")
            self._pipes[0].flush()

    @property
    def is_busy(self) -> bool:
        """Return whether an order is not collected yet."""
        return self._order is not None

    @property
    def has_answered(self) -> bool:
        """Return whether there is an order to collect, and `collect` would not wait."""
        return self.is_busy and bool(select.select([self._pipes[1]], [], [], 0)[0])

    def collect(self) -> tuple[str, float]:
        """Waits for the end of the order; returns the path of what was written, and the seconds since the order.

        Raises:
            CheckpointError, OSError, TypeError, ValueError: it was not written; older checkpoints are untouched.
        """
        order, self._order = self._order, None
        assert order is not None
        assert self._process is not None
        while not select.select([self._pipes[1]], [], [], _LOOK_EVERY_S)[0]:
            # A disk may be slow, and is waited for. A process that somebody stopped would never answer.
            self._process.send_signal(signal.SIGCONT)
        line = self._pipes[1].readline()
        if not line.endswith(b"\n"):
            status = self._process.wait()
            how = f"was killed by {name_signal(-status)}" if status < 0 else f"exited with code {status}"
            raise CheckpointError(
                f"{order} was not written: the process that writes beside training (pid {self._process.pid}) "
                f"{how}. What was written before is untouched."
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise error_class(answer["kind"])(answer["error"])
        return str(answer["path"]), time.perf_counter() - self._began_s

    def close(self) -> None:
        """Lets it finish what it writes, and ends it."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.wait()
            process.stdout.close()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    def _start(self) -> None:
        self._memory = os.memfd_create("photinus-saving")
        environ = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environ["PYTHONSAFEPATH"] = "1"  # a file in the working directory may have a library's name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "photinus.trainer.checkpoint.writer_process", str(self._memory), str(os.getpid())],
            pass_fds=[self._memory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environ},
            start_new_session=True,  # Ctrl-C is for the ranks, which wait for what is being written
        )

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout


class _MemoryFile:
    """A memory file to write from its start, as torch.save wants it. Its pages are kept from one state to the next:
    new ones cost three times as long as the copy."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Writes all of `data`. An error is raised at the end: torch's writer would hide it."""
        view = memoryview(data).cast("B")
        rest = view
        try:
            while self._error is None and len(rest):
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError as error:
            self._error = error
        return len(view)

    def flush(self) -> None:
        """Nothing is held back."""

    def __enter__(self) -> _MemoryFile:
        self._crc32 = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # the file on disk gets them
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        return self

    def __exit__(self, *_: object) -> None:
        torch.serialization.set_crc32_options(self._crc32)
        os.ftruncate(self._descriptor, os.lseek(self._descriptor, 0, os.SEEK_CUR))
        if self._error is not None:
            raise self._error


WRITER, FILE_WRITER = Writer(), Writer()
"""This process's: for the checkpoints of loops, and for `photinus.save`."""
atexit.register(WRITER.close)
