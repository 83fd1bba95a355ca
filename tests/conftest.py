"""What holds for every test: no job of the command line outlives the test that started it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_job_is_left() -> Iterator[None]:
    """A test that fails half-way has not waited for the jobs that it started."""
    yield
    module = sys.modules.get("tests.dist.test_run")
    if module is not None:
        module.RunningJob.kill_all()
