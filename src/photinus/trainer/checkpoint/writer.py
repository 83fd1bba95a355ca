"""A process that writes checkpoints while the ranks train on: the end of it in a rank.

A process (writer_process.py) and not a thread, because torch.save holds the interpreter while it goes through a large
tensor. The first state that is large enough starts it, and it imports torch while the ranks train. It gets an order and
the memory files to read over a socket, writes what they hold, and answers with a line of JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...job.deaths import describe_end
from ...parallel.exchange.agreement import JSON, error_class
from .state_memory import HostImage, StateMemory

_LOOK_EVERY_S = 5.0


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
    """The end of that process in a rank. One order at a time, by one thread.

    Attributes:
        memory: the memory from which it writes.
        order: the one for which `wait` was not called yet.
    """

    def __init__(self) -> None:
        self.memory = StateMemory()
        self._process: subprocess.Popen[bytes] | None = None
        self.order: Order | None = None
        self._image: HostImage | None = None
        self._then: Callable[[str, float], None] | None = None
        self._answer: dict[str, Any] | None = None
        self._began_s = 0.0

    def write(self, order: Order, image: HostImage, then: Callable[[str, float], None] | None = None) -> None:
        """Lets a state in memory be written. Until `wait`, nobody may overwrite it, and there is no other order.

        Args:
            then: called by `wait` with the path of what was written, and the seconds since the order.

        Raises:
            CheckpointError: the process cannot be started.
        """
        assert self.order is None, "one at a time"
        request = os.memfd_create("photinus-order")  # of any length
        try:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._start()
            with open(request, "wb", closefd=False) as file:
                torch.save({"order": asdict(order), **asdict(image), "files": None}, file)
            self.order, self._image, self._then, self._began_s = order, image, then, time.perf_counter()
            with contextlib.suppress(BrokenPipeError):  # `wait` says that it ended
                socket.send_fds(self._socket, [b"\n"], [request, *image.files])
        except OSError as error:
            raise CheckpointError(f"{order} cannot be handed to a process that writes it: {error}") from error
        finally:
            os.close(request)

    @property
    def is_busy(self) -> bool:
        """Return whether `wait` was not called for an order yet."""
        return self.order is not None

    @property
    def has_answered(self) -> bool:
        """Return whether `wait` would not wait; on a host that only writes parts, whether that failed."""
        if self.is_busy and self._answer is None and self._is_readable(0.0):
            self._answer = self._read_answer()
        return self._answer is not None and (not self._writes_parts or "error" in self._answer)

    @property
    def _writes_parts(self) -> bool:
        """Return whether another host leads the order."""
        return self._image is not None and self._image.host > 0

    def wait(self) -> None:
        """Wait for the end of the order, if there is one.

        Raises:
            CheckpointError, OSError, TypeError, ValueError: it was not written; older checkpoints are untouched.
        """
        if self.order is None:
            return
        assert self._process is not None
        while self._answer is None:
            if self._is_readable(_LOOK_EVERY_S):
                self._answer = self._read_answer()
            else:
                # A disk may be slow, and is waited for. A process that somebody stopped would never answer.
                self._process.send_signal(signal.SIGCONT)
        answer, self._answer, self.order = self._answer, None, None
        if "error" in answer:
            raise error_class(answer["kind"])(answer["error"])
        if self._then is not None and not self._writes_parts:
            self._then(str(answer["path"]), time.perf_counter() - self._began_s)

    def _is_readable(self, within_s: float) -> bool:
        poll = select.poll()  # `select.select` takes no descriptor above 1023: a data set may hold many files open
        poll.register(self._socket, select.POLLIN)
        return poll.poll(within_s * 1000) != []

    def _read_answer(self) -> dict[str, Any]:
        assert self._process is not None
        with self._socket.makefile("rb") as file, contextlib.suppress(OSError):
            line = file.readline()
            if line.endswith(b"\n"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        how = describe_end(self._process.wait())
        error = (
            f"{self.order} was not written: the process that writes beside training (pid {self._process.pid}) "
            f"{how}. What was written before is untouched."
        )
        if self._image is not None and self._writes_parts:
            from .parts import write_failure

            write_failure(Path(self._image.folder), self._image.token, self._image.host, error)
        return {"kind": "CheckpointError", "error": error}

    def close(self) -> None:
        """Lets it finish what it writes, and ends it."""
        self._end()
        self.memory.close()

    def forget(self) -> None:
        """Closes, in a child that was forked, what is the parent's: else the process does not see the parent's end."""
        if self._process is not None:
            self._process.returncode = 0  # no child of this process
            self._socket.close()
        self._process, self.order, self._answer = None, None, None
        self.memory.close()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self._socket.close()
            process.wait()

    def _start(self) -> None:
        environ = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environ["PYTHONSAFEPATH"] = "1"  # a file in the working directory may have a library's name
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "photinus.trainer.checkpoint.writer_process", str(os.getpid())],
                stdin=theirs.fileno(),
                env={**os.environ, **environ},
                start_new_session=True,  # Ctrl-C is for the ranks, which wait for what is being written
            )


WRITER, FILE_WRITER = Writer(), Writer()
"""This process's: for the checkpoints of loops, and for `photinus.save`."""
atexit.register(WRITER.close)
os.register_at_fork(after_in_child=WRITER.forget)
os.register_at_fork(after_in_child=FILE_WRITER.forget)
