"""Runs a plan in a process of its own, with a deadline, and leaves nothing of it behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.conformance.plan import Plan
from tests.fork_server import REPOSITORY

Outcomes = dict[str, dict[str, Any]]
TEST_TIMEOUT_S = 180.0
"""For one test. Most take half a second; one in which four ranks compile a model takes a minute on two busy cores."""


def plan_arguments(plan: Plan) -> list[str]:
    """The command line of a plan."""
    given = [f"--backend={plan.backend}", f"--world-size={plan.world_size}", f"--like={plan.like}", f"--ddp={plan.ddp}"]
    given += [f"--answers-as={plan.answers_as}"] if plan.answers_as is not None else []
    given += [f"--hosts={plan.hosts}"] if plan.hosts is not None else []
    return given + (["--cuda-on-cpu"] if plan.cuda_on_cpu else [])


def measure(
    plan: Plan, names: Iterable[str] | None = None, *, timeout_s: float = TEST_TIMEOUT_S, deadline_s: float
) -> Outcomes:
    """The outcome of each of the tests (default: all) by name; AssertionError if the run is not over by the deadline.

    The ranks end with the runner, and all files are made in a folder that goes at the end.
    """
    with tempfile.TemporaryDirectory(prefix="photinus-test-") as folder:
        written, log = Path(folder, "outcomes.json"), Path(folder, "log")
        command = [sys.executable, "-m", "tests.conformance", *plan_arguments(plan)]
        command += [f"--json={written}", f"--timeout={timeout_s}"]
        if names is not None:
            listed = Path(folder, "names")
            listed.write_text("\n".join(names))
            command.append(f"--names={listed}")
        environ = {**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
        with log.open("w") as output:
            try:
                ended = subprocess.run(
                    command, cwd=REPOSITORY, env=environ, stdout=output, stderr=output, timeout=deadline_s, check=False
                )
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{plan}: not over after {deadline_s} s\n{log.read_text()[-8000:]}") from None
        assert ended.returncode == 0, f"{plan}: exit code {ended.returncode}\n{log.read_text()[-8000:]}"
        outcomes: Outcomes = json.loads(written.read_text())
        return outcomes
