"""Backends of torch.distributed, measured in turn in the same ranks, which `photinus.launch` starts.

A backend that fails ends the job, whatever it does: it raises, crashes, or waits without end. Rank 0 tells what it
begins, so the command knows which backend it was.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

from ...errors import LaunchError
from ...run.from_python import launch
from ...run.local.devices import VISIBLE
from .finding import LATE
from .plan import JobOutput, Plan


class BackendError(LaunchError):
    """A backend failed: its name, and why. `is_late`: it gave no answer in time."""

    def __init__(self, backend: str, reason: str, *, is_late: bool) -> None:
        super().__init__(reason)
        self.backend, self.is_late = backend, is_late


def measure(plan: Plan, ranks: int, show: Callable[[str], object] = lambda text: None) -> list[dict[str, float]]:
    """For each of the plan's calls, the seconds that it takes on the slowest rank, by contestant.

    `show` gets a line about what begins.

    Raises:
        BackendError: one of the backends failed.
        LaunchError: no rank can be started from here.
    """
    begun = [plan.contestants[0]]

    def hear(told: dict[str, Any]) -> None:
        begun[:] = told["begins"]
        show(" ".join(begun))

    said = JobOutput(hear)
    on_gpus = plan.device == "cuda" or "nccl" in plan.contestants
    visible = os.environ.get(VISIBLE) if on_gpus else ""
    try:
        with contextlib.redirect_stdout(said):  # what the launcher and all ranks print then comes here
            return launch(measure_here, nprocs=ranks, args=(plan, visible), cpu=True, oversubscribe=True)[0]
    except LaunchError as error:
        if not said.rest:
            raise
        is_late = error.exit_code == 128 + signal.SIGALRM
        lines = said.rest.splitlines()
        cause = next((line for line in lines if line.startswith("rank ")), lines[-1])  # the launcher's on the first
        raise BackendError(begun[0], LATE.format(plan.timeout_s) if is_late else cause, is_late=is_late) from None


def measure_here(plan: Plan, visible: str | None) -> list[dict[str, float]]:
    """Measures, as one of the ranks. `visible`: CUDA_VISIBLE_DEVICES of the command; None: it is not set there."""
    # Nobody handles the signal, so it ends a rank in C++ too, which takes no exception while it waits.
    signal.setitimer(signal.ITIMER_REAL, plan.timeout_s)
    # The launcher hid the GPUs, for it would give each rank one of its own: ranks may share them here.
    os.environ.pop(VISIBLE, None)
    os.environ.update({} if visible is None else {VISIBLE: visible})
    from .backend_rank import give_turns  # imports torch

    return give_turns(plan)
