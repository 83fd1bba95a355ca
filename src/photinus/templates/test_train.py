"""Tests of what this project promises, with two small processes on the CPU: run `pytest`."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def train(out: Path, *words: str, processes: int = 2) -> str:
    """Runs train.py to its end and returns what it printed."""
    launcher = ["-m", "photinus", "run", "--nproc-per-node", str(processes), "--max-restarts", "0"]
    command = [*launcher, str(HERE / "train.py")] if processes > 1 else [str(HERE / "train.py")]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    words = ("--epochs", "2", "--out", str(out), *words)
    job = subprocess.run([sys.executable, *command, *words], capture_output=True, text=True, timeout=300, env=environ)
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


def rows(file: Path) -> list[dict[str, float]]:
    """The rows of metrics.csv (one per epoch) or losses.csv (one per step)."""
    with open(file, newline="") as lines:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(lines)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short run of two processes."""
    out = tmp_path_factory.mktemp("run")
    train(out)
    return out


def test_two_processes_learn_and_leave_checkpoints(run: Path) -> None:
    epochs = rows(run / "metrics.csv")
    assert [row["epoch"] for row in epochs] == [1, 2]
    assert epochs[1]["loss"] < epochs[0]["loss"]
    assert epochs[1]["accuracy"] > 0.8
    assert len(list((run / "checkpoints").glob("step-*"))) == 2


def test_a_resumed_run_ends_with_the_same_numbers(run: Path, tmp_path: Path) -> None:
    first = min((run / "checkpoints").glob("step-*"))
    assert f"resumed from {first}" in train(tmp_path, "--resume", str(first))
    whole, resumed = rows(run / "losses.csv"), rows(tmp_path / "losses.csv")
    assert [row["loss"] for row in resumed] == [row["loss"] for row in whole]


def test_one_process_has_the_same_losses(run: Path, tmp_path: Path) -> None:
    train(tmp_path, processes=1)
    for one, two in zip(rows(tmp_path / "losses.csv")[:10], rows(run / "losses.csv")[:10], strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)
