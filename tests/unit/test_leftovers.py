"""A run of tests that leaves something behind fails, and says what and since when (tests/conftest.py)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fork_server import REPOSITORY

LEAVES = """
import subprocess, sys, tempfile
from pathlib import Path
def test_that_leaves():
    tempfile.mkdtemp(prefix="forgotten-")
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
    Path(__file__).with_name("pid").write_text(str(left.pid))
def test_after():
    pass
"""


def run_tests(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(folder), "-c", os.devnull, str(folder / "test_it.py")]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


@pytest.mark.seconds
def test_what_a_run_leaves_fails_it_and_is_named_with_its_test(tmp_path: Path) -> None:
    done = run_tests(tmp_path, LEAVES)
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, signal.SIGKILL)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 passed, 1 error" in done.stdout
    # A set: where the variable CI is set, pytest says an error's lines once more in its summary.
    (file,) = {line for line in done.stdout.splitlines() if line.startswith("forgotten-")}
    assert file.endswith(" in TMPDIR, there since test_it.py::test_that_leaves")
    assert f"process {pid}: " in done.stdout


@pytest.mark.seconds
def test_a_run_that_leaves_nothing_passes(tmp_path: Path) -> None:
    done = run_tests(tmp_path, "def test_nothing(tmp_path):\n    (tmp_path / 'kept-by-pytest').touch()\n")
    assert done.returncode == 0, done.stdout + done.stderr
