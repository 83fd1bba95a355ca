"""SIGKILL in mid-epoch, and the final weights are those of a run that nothing happened to: SHA-256 of every bit.

The run has BatchNorm, dropout, momentum, a scheduler and random augmentation (tests/small_run.py).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from photinus.runlog.tables import read_rows
from photinus.trainer.record.run_folder import RunFolder
from tests.fork_server import REPOSITORY
from tests.ranks import run_ranks, values
from tests.small_run import train

RUN = {"batch_size": 12, "samples": 60, "epochs": 2, "save_every": 1}  # 5 steps an epoch


def run_to_the_end(rank: int, world_size: int) -> dict[str, Any]:
    return train(None, backend="auto", **{**RUN, "save_every": None})


def run_and_die(rank: int, world_size: int, out: str, dying_rank: int, at_step: int) -> dict[str, Any]:
    def kill(step: int) -> None:
        if (rank, step) == (dying_rank, at_step):
            os.kill(os.getpid(), signal.SIGKILL)

    return train(out, backend="auto", kill=kill, **RUN)


def test_the_launcher_restarts_after_two_kills_in_one_epoch_and_no_bit_differs(tmp_path: Path) -> None:
    whole = values(run_ranks("tests.faults.test_resume:run_to_the_end", world_size=2, backend="photinus"))
    options = json.dumps({**RUN, "backend": "photinus"})
    kills = "0:1:7,1:0:9"  # attempt 0: rank 1 in the body of step 7; attempt 1: rank 0 in that of step 9
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "photinus"), "run", "--nproc-per-node", "2", "--max-restarts", "2",
            str(REPOSITORY / "tests" / "small_run.py"), str(tmp_path), kills, options,
        ],
        capture_output=True, text=True, timeout=150, cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["attempt"] for one in found] == [2, 2]
    assert found[0]["began_at"] in (7, 8)  # the last checkpoint before the second kill
    assert [one["fingerprint"] for one in found] == [one["fingerprint"] for one in whole]
    assert [row["step"] for row in read_rows(tmp_path / "losses.csv")] == list(range(1, 11))
    assert "SIGKILL" in done.stdout + done.stderr


NAMED_BY_PID = """
import json, os, signal, sys
from tests.small_run import train

def kill(step):
    if (os.environ["TORCHELASTIC_RESTART_COUNT"], step) == ("0", 7):
        os.kill(os.getpid(), signal.SIGKILL)

options = json.loads(sys.argv[1])
train(f"first-{os.getpid()}", **{**options, "epochs": 1})  # is finished, and no run to go on with
print("began at", train(f"second-{os.getpid()}", kill=kill, **options)["began_at"])
"""


def test_a_run_whose_folder_is_named_by_the_pid_goes_on_in_the_folder_of_the_attempt_before(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NAMED_BY_PID)
    command = [str(Path(sys.executable).parent / "photinus"), "run", "--nproc-per-node", "1", "train.py"]
    options = {**RUN, "backend": "photinus"}
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    words = [*command, json.dumps(options)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=150, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    (second,) = tmp_path.glob("second-*")
    assert "began at 6\n" in done.stdout
    assert re.search(
        rf"note: goes on in {second.name}, where the attempt before was, and not in second-\d+: ", done.stdout
    )
    assert len(list(tmp_path.glob("first-*"))) == 2
    assert [row["step"] for row in read_rows(second / "losses.csv")] == list(range(1, 11))


def test_another_run_than_that_of_the_attempt_before_begins_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, other, same = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    train(before, epochs=2, cut_at_step=None)
    monkeypatch.setattr(RunFolder, "_begun", 0)
    monkeypatch.setenv("PHOTINUS_OUT", f"0:{before}")
    assert train(other, epochs=3)["began_at"] == 0  # its options are other ones
    assert (
        f"warning: the attempt before was in {before}, and this one begins in {other}: give" in capsys.readouterr().out
    )
    assert train(same, epochs=2)["began_at"] == 0  # it is the second of this process
    monkeypatch.setattr(RunFolder, "_begun", 0)
    assert train(other, epochs=3)["began_at"] == 18  # has checkpoints of its own
    monkeypatch.setattr(RunFolder, "_begun", 0)
    assert train(tmp_path / "d", epochs=2)["began_at"] == 12


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_restarts_by_hand_change_no_bit(tmp_path: Path, world_size: int) -> None:
    whole = values(run_ranks("tests.faults.test_resume:run_to_the_end", world_size=world_size, backend="photinus"))
    for at_step in (7, 9):
        dying_rank = at_step % world_size
        expect = {rank: -9 if rank == dying_rank else 1 for rank in range(world_size)}
        arguments = {"out": str(tmp_path), "dying_rank": dying_rank, "at_step": at_step}
        run_ranks(
            "tests.faults.test_resume:run_and_die", world_size=world_size, backend="photinus", expect=expect,
            arguments=arguments,
        )  # fmt: skip
    arguments = {"out": str(tmp_path), "dying_rank": 0, "at_step": 0}
    results = run_ranks(
        "tests.faults.test_resume:run_and_die", world_size=world_size, backend="photinus", arguments=arguments
    )
    found = values(results)
    assert found[0]["began_at"] in (7, 8)
    assert [one["fingerprint"] for one in found] == [one["fingerprint"] for one in whole]
