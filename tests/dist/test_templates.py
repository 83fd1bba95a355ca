"""The project of `photinus new`, as its owner uses it: its test and linters; and examples/gpt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from photinus.runlog.tables import read_rows

pytestmark = pytest.mark.slow

SCRIPTS = Path(sys.executable).parent
REPOSITORY = Path(__file__).resolve().parent.parent.parent
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "digits"
    run(tmp_path, SCRIPTS / "photinus", "new", folder)
    return folder


def run(cwd: Path, *command: str | Path, timeout_s: float = 200.0) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=cwd,
        env={**environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(800)
@pytest.mark.parametrize("way", ["with_trainer", "with_loop"])
def test_its_own_test_passes_with_the_trainer_and_with_the_loop(project: Path, way: str) -> None:
    script = project / "train.py"
    script.write_text(script.read_text().replace("train = with_trainer", f"train = {way}"))
    assert "3 passed" in run(project, sys.executable, "-m", "pytest", "-q", timeout_s=380)


def test_it_is_clean_by_the_usual_tools(project: Path) -> None:
    run(project, SCRIPTS / "ruff", "check", "--isolated", "--select", "E,F,W,I,N,B,UP,RUF", "--line-length", "120", ".")
    run(project, SCRIPTS / "ruff", "format", "--isolated", "--line-length", "120", "--check", ".")
    cache = REPOSITORY / ".mypy_cache" / "templates"
    run(project, sys.executable, "-m", "mypy", "--strict", "--cache-dir", cache, "train.py", "test_train.py")


@pytest.mark.timeout(1000)
def test_the_gpt_of_the_examples_learns_to_write(tmp_path: Path) -> None:
    command = [SCRIPTS / "photinus", "run", "--nproc-per-node", "2", REPOSITORY / "examples" / "gpt" / "train.py"]
    assert "it writes:" in run(tmp_path, *command, "--out", "gpt", timeout_s=900)
    assert read_rows(tmp_path / "gpt" / "metrics.csv")[-1]["valid_loss"] <= 4.3
