"""The status that a worker writes into a memory file of its launcher: one line, fixed except for its end.

    letter   what a request to suspend would find here:
                 r  it would be heard; SIGTERM would end the worker if it were not for that
                 c  it would be heard; SIGTERM calls a handler of the script as well
                 s  the worker is saving
                 -  it would not be heard
    steps    how far training is: the run's step where a Loop says it, else the steps of torch's optimizers in this
             process, or its calls of `suspend_requested`; 0 before the first
    saved    the run's step at its newest checkpoint on a disk, of this process or resumed from; -1 for none
    pid      of the process that writes: of a program (--no-python) it may be a child, as of a shell script
    out      NUMBER:FOLDER of the run that it is in, and how many it began before; empty outside

The launcher reads it when the worker is dead, too: a restart makes sense only if there is something to go on with.
Without a launcher that reads, everything here does nothing.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from .. import env
from .worker_files import WorkerFiles

LAST_CHECKPOINT = "the last checkpoint is of step {}"
RESUMES = "the same command resumes from there"
HEARD = "rcs"
ONLY_ASKED_BY_SIGTERM = "rs"
SUSPENDED_CODE = 75  # EX_TEMPFAIL of sysexits.h, "try again later"
_WIDTH = 20


@dataclass
class Status:
    """See the module's docstring."""

    letter: str = "-"
    steps: int = 0
    saved: int = -1
    pid: int = 0
    out: str = ""


_status = Status()
_file: int | None = -1  # -1: not looked for yet; None: no launcher reads
_counter: object = None
_counts = True  # until `update` gets steps


def update(
    *, letter: str | None = None, steps: int | None = None, saved: int | None = None, out: str | None = None
) -> None:
    """Write what has changed."""
    global _counts
    _counts = _counts and steps is None
    changes = {"letter": letter, "steps": steps, "saved": saved, "out": out}
    vars(_status).update({name: value for name, value in changes.items() if value is not None})
    _write()


def count_optimizer_steps() -> None:
    """From now on writes each step of a torch.optim optimizer, until `update` gets steps from a loop."""
    if env.WORKER_FILES.get() is None:
        return
    from ..optimizer_steps import StepWatcher, watch_steps

    class Counter(StepWatcher):
        def step_ended(self, optimizer: object) -> None:
            if _counts:
                _status.steps += 1
                _write()

    global _counter
    watch_steps(_counter := Counter())


def read(text: str) -> Status:
    """Read a worker's last status; `text` is the content of its file, perhaps empty."""
    steps, saved, pid = (text[1 + _WIDTH * number : 1 + _WIDTH * (number + 1)] for number in range(3))
    out = text[1 + 3 * _WIDTH :].partition("\n")[0]
    return Status(text[:1], int(steps), int(saved), int(pid), out) if text else Status()


def _write() -> None:
    global _file
    if _file == -1:
        _file, path = None, WorkerFiles.of_this_process().status
        with contextlib.suppress(OSError):  # of a launcher that is gone
            _file = os.open(path, os.O_WRONLY | os.O_CLOEXEC) if path else None
    if _file is not None:
        numbers = f"{_status.steps:>{_WIDTH}}{_status.saved:>{_WIDTH}}{os.getpid():>{_WIDTH}}"
        os.pwrite(_file, f"{_status.letter}{numbers}{_status.out}\n".encode(errors="surrogateescape"), 0)
