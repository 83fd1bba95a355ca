"""The example, unchanged, under every launcher: real digits, real accuracy."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from photinus.parallel import STRATEGIES
from photinus.runlog.tables import Row, read_rows
from tests.dist.test_run_hosts import free_port
from tests.ranks import run_ranks
from tests.scripts import run_script

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SCRIPTS = Path(sys.executable).parent
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _run(*command: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
    done = subprocess.run(
        [*command],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=REPOSITORY,
        env={**environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _run_by_hand(*words: str, ranks: int = 1) -> str:
    """What rank 0 of `python script ...` printed, without a launcher and the seconds in which interpreters start."""
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = {"words": words}
    ended = run_ranks(f"{__name__}:example", world_size=ranks, timeout_s=150, environ=master, arguments=arguments)
    return ended[0].output


def example(rank: int, world_size: int, words: list[str]) -> None:
    run_script(str(REPOSITORY), str(REPOSITORY / words[0]), *words[1:])


def test_two_processes_reach_97_percent_and_leave_picture_and_numbers(tmp_path: Path) -> None:
    script, out = "examples/digits/train.py", str(tmp_path / "run")
    told = _run(str(SCRIPTS / "photinus"), "run", "--nproc-per-node", "2", script, "--out", out)
    assert "2 ranks on 1 host" in told
    assert "backend photinus" in told
    assert f"results in {out}: metrics.csv, losses.csv, curves.png, config.json, checkpoints/" in told
    rows = read_rows(tmp_path / "run" / "metrics.csv")
    assert [row["epoch"] for row in rows] == list(range(1, 16))
    assert rows[-1]["accuracy"] >= 0.97
    assert (tmp_path / "run" / "curves.png").stat().st_size > 10_000
    again = _run_by_hand(script, "--out", out)  # another launcher, another world size
    assert "finished already: 15 of 15 epochs done" in again
    assert read_rows(tmp_path / "run" / "metrics.csv") == rows


def test_every_launcher_trains_the_same_model(tmp_path: Path) -> None:
    torchrun = [str(SCRIPTS / "torchrun"), "--standalone", "--nproc-per-node", "2", "--log-dir", str(tmp_path / "logs")]
    launched = {
        "1": (_run_by_hand, ["examples/digits/train_loop.py"]),
        "2": (_run, [*torchrun, "examples/digits/train_loop.py"]),
        # `photinus run` has a test above; four interpreters more would tell nothing but take ten seconds of a core.
        "4": (partial(_run_by_hand, ranks=4), ["examples/digits/train.py"]),
    }
    accuracies, losses = {}, {}
    for name, (run, command) in launched.items():
        told = run(*command, "--epochs", "2", "--batch_size", "64", "--log_path", str(tmp_path / name))
        assert f"photinus: {name} rank" in told
        accuracies[name] = read_rows(tmp_path / name / "metrics.csv")[-1]["accuracy"]
        losses[name] = read_rows(tmp_path / name / "losses.csv")
    assert max(accuracies.values()) - min(accuracies.values()) <= 0.01
    assert min(accuracies.values()) > 0.9
    for name in ("2", "4"):
        assert _largest_difference(losses["1"], losses[name], steps=20) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in ("ddp", "dp")])
def test_two_processes_reach_97_percent_under_each_strategy_and_go_on_with_ddp(tmp_path: Path, strategy: str) -> None:
    out = str(tmp_path / "run")
    run = [str(SCRIPTS / "photinus"), "run", "--nproc-per-node", "2"]
    _run(*run, "examples/digits/train_loop.py", "--out", out, "--strategy", strategy, "--epochs", "9")
    _run(*run, "examples/digits/train.py", "--out", out, "--strategy", "ddp", "--epochs", "10")
    rows = read_rows(tmp_path / "run" / "metrics.csv")
    assert [row["epoch"] for row in rows] == list(range(1, 11))
    assert rows[-1]["accuracy"] >= 0.97
    assert rows[-2]["accuracy"] >= 0.97


@pytest.mark.slow
def test_one_process_reaches_97_percent_with_dp(tmp_path: Path) -> None:
    _run(sys.executable, "examples/digits/train.py", "--out", str(tmp_path / "run"), "--strategy", "dp")
    assert read_rows(tmp_path / "run" / "metrics.csv")[-1]["accuracy"] >= 0.97


def _largest_difference(first: list[Row], second: list[Row], steps: int) -> float:
    pairs = list(zip(first, second, strict=True))[:steps]
    assert len(pairs) == steps
    return max(abs(a["loss"] - b["loss"]) / a["loss"] for a, b in pairs)
