"""Tests that need a GPU: each has the mark `gpu`, is skipped where there is none, and tells its outcome as it ends.

make gpu            all of them and the benchmarks, on a machine with a GPU
make gpu FAKE=1     those that can, on CPU tensors; the others say what they would have done
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.device import FAKE, HAS_GPU

_HERE = Path(__file__).parent
_RESULTS = os.environ.get("GPU_RESULTS")


@pytest.hookimpl(trylast=True)  # what -k leaves out is not planned
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if _HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if not HAS_GPU and not FAKE:
            item.add_marker(pytest.mark.skip(reason="no GPU here; `make gpu FAKE=1` runs this on CPU tensors"))
        needs = item.get_closest_marker("needs_gpu")
        if needs is not None and FAKE:
            item.add_marker(pytest.mark.skip(reason=f"without a GPU: {needs.args[0]}"))
    for item in ours:
        _tell(check=item.name, outcome="planned")


def pytest_runtest_logstart(nodeid: str) -> None:
    if "tests/gpu/" in nodeid:
        _tell(check=nodeid.split("::", 1)[1], outcome="begun")


def pytest_runtest_logreport(report: Any) -> None:
    """One line for each test: of its call, or of what failed or skipped it before or after."""
    if "tests/gpu/" not in report.nodeid or (report.when != "call" and report.passed):
        return
    outcome = {"passed": "pass", "failed": "miss", "skipped": "skip"}[report.outcome]
    reason = ""
    if report.skipped:
        reason = str(report.longrepr[2]).removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
    elif report.failed:
        reason = report.longreprtext
    figure = "; ".join(f"{name} {value}" for name, value in report.user_properties)
    check = report.nodeid.split("::", 1)[1]
    _tell(check=check, outcome=outcome, figure=figure, reason=reason[-1500:], seconds=round(report.duration, 2))


def _tell(**facts: Any) -> None:
    if _RESULTS:
        with open(_RESULTS, "a", encoding="utf-8") as file:
            file.write(json.dumps({"stage": os.environ.get("GPU_STAGE", ""), **facts}) + "\n")
