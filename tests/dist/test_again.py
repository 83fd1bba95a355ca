"""`photinus again`, for real: a job of two processes is started once more, with more epochs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from photinus.runlog.tables import read_rows

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SCRIPT = REPOSITORY / "examples" / "digits" / "train_loop.py"


def photinus(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "photinus", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_processes_and_arguments(tmp_path: Path) -> None:
    words = ("--batch-size", "32", "--out", "run", "--resume", "never")
    first = photinus("run", "--nproc-per-node", "2", SCRIPT, "--epochs", "1", *words, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    again = photinus("again", "run", "--epochs", "2", cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"photinus: in {tmp_path}: " in again.stderr
    assert "photinus: 2 ranks on 1 host" in again.stdout
    assert "resumed from run/checkpoints/step-00000044" in again.stdout
    assert [row["epoch"] for row in read_rows(tmp_path / "run" / "metrics.csv")] == [1, 2]
    finished = photinus("again", tmp_path / "run", cwd=REPOSITORY)
    assert "finished already: all 2 epochs are done" in finished.stdout, finished.stderr
