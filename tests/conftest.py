"""What holds for every test: no job of the command line outlives the test that started it, and no process group."""

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


@pytest.fixture(autouse=True)
def no_session_is_left() -> Iterator[None]:
    """The next test would find a session, or a group of another size than it means."""
    yield
    module = sys.modules.get("photinus.trainer.session.session")
    assert module is None or module.current_session() is None, "the test leaves a session open"
    module = sys.modules.get("torch.distributed")
    assert module is None or not module.is_initialized(), "the test leaves a process group"
