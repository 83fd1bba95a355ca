"""Backends of torch.distributed, measured in rounds by the same ranks, which `photinus.launch` starts.

A backend that fails ends the job, whatever it does: it raises, crashes, or waits without end. Rank 0 sends what it
begins, so the command knows which backend it was.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...errors import LaunchError
from ...run.local.devices import VISIBLE
from .finding import LATE
from .plan import COPY, JobOutput, Plan


def measure(
    plan: Plan, ranks: int, show: Callable[[str], object] = lambda text: None
) -> tuple[list[dict[str, float]], dict[str, str]]:
    """Measure backends, and start again without each one that fails.

    Args:
        show: called with a line about what begins.

    Returns:
        For each call of the plan, its seconds on the slowest rank by contestant. And for each backend that failed, why.

    Raises:
        LaunchError: ranks cannot be started from here, or cannot even copy.
    """
    remaining, absent, begun = list(plan.contestants), dict[str, str](), list[str]()
    on_gpus = plan.device == "cuda" or "nccl" in plan.contestants
    visible = os.environ.get(VISIBLE) if on_gpus else ""

    def receive(message: dict[str, Any]) -> None:
        begun[:] = message["begins"]
        show(" ".join(begun))

    from ...run.from_python import launch

    while remaining and remaining[0] != COPY:
        # Nothing measured before a failure is used: a backend that hangs or crashes may have slowed the others.
        output = JobOutput(receive)
        begun[:] = remaining[:1]
        arguments = replace(plan, contestants=tuple(remaining)), visible
        try:
            with contextlib.redirect_stdout(output):  # also catches what the launcher and all ranks print
                return launch(measure_here, nprocs=ranks, args=arguments, cpu=True, oversubscribe=True)[0], absent
        except LaunchError as error:
            if not output.rest or begun[0] == COPY:
                raise
            # If several ranks fail, the launcher's first line names the one that failed first.
            lines = output.rest.splitlines()
            cause = next((line for line in lines if line.startswith("rank ")), lines[-1])
            is_late = error.exit_code == 128 + signal.SIGALRM
            absent[begun[0]] = LATE.format(plan.timeout_s) if is_late else cause
            remaining.remove(begun[0])
    return [], absent


def measure_here(plan: Plan, visible: str | None) -> list[dict[str, float]]:
    """Measure as one of the ranks. `visible`: CUDA_VISIBLE_DEVICES of the command; None: it is not set there."""
    # No handler is set, so the signal ends a rank in C++ too, where a waiting call takes no exception.
    signal.setitimer(signal.ITIMER_REAL, plan.timeout_s)
    # The launcher hid the GPUs, because it gives each rank one of its own. Here ranks may share them.
    os.environ.pop(VISIBLE, None)
    os.environ.update({} if visible is None else {VISIBLE: visible})
    from .backend_rank import give_turns  # torch reads the variable, and the command imports no torch

    return give_turns(plan)
